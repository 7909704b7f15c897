"""Which method to use, in one sentence, and up to which bandwidth it is faster than dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.lab.tune.job import Job
from gradsieve.lab.tune.method import DENSE, Method, baselines
from gradsieve.lab.tune.predict import FASTEST, SLOWEST, Model, crossing

CLOSE = 1.05  # the default is recommended if it takes at most this many times the fastest's time
LEAST_DENSITY = 0.01  # of gradients in a recommended setting: the lowest at which a training run was level with dense
NOT_RECOMMENDED = ("randomk",)  # the simplest baseline, which learns less at the same density (docs/convergence.md)
WORTH = 1.02  # dense is kept unless another method is faster by this factor


@dataclass(frozen=True)
class Recommendation:
    """What to paste, and why."""

    method: Method
    seconds: float
    dense_seconds: float
    fastest: Method  # of this library
    fastest_seconds: float
    best_torch: Method  # of dense and torch's hooks
    best_torch_seconds: float
    faster_below: float | None  # bits per second below which the library's choice is faster than dense

    @property
    def keeps_dense(self) -> bool:
        return self.method.recipe == DENSE

    @property
    def sentences(self) -> list[str]:
        """For the terminal, in order of importance."""
        return [part for part in (self._choice, self._break_even, self._torch) if part]

    @property
    def _choice(self) -> str:
        if self.keeps_dense:
            return (
                f"Keep dense DDP: {_ms(self.dense_seconds)} per step. The fastest setting here, {self.fastest.name}, "
                f"would take {_ms(self.fastest_seconds)}."
            )
        gain = f"{self.dense_seconds / self.seconds:.3g} times faster than dense ({_ms(self.dense_seconds)})"
        text = f"Use {self.method.name}: {_ms(self.seconds)} per step, {gain}."
        if self.method != self.fastest:
            text += f" The fastest is {self.fastest.name} ({_ms(self.fastest_seconds)})"
            if not may_be_recommended(self.fastest):
                text += ", with which a run may learn less"
            text += ": close, and the default learns as dense does with Adam." if self.method.is_default else "."
        return text

    @property
    def _break_even(self) -> str:
        name = self.fastest.name if self.keeps_dense else self.method.name
        if self.faster_below is None:
            return f"{name} is slower than dense at any bandwidth."
        if self.faster_below >= FASTEST:
            return f"{name} is faster than dense at any bandwidth."
        return f"Dense is faster from about {rate_text(self.faster_below)} on; below that, {name} is."

    @property
    def _torch(self) -> str:
        if self.best_torch.recipe == DENSE or self.best_torch_seconds * WORTH > self.seconds:
            return ""
        return f"torch's {self.best_torch.name} is faster still: {_ms(self.best_torch_seconds)}."


def recommend(model: Model, job: Job, methods: Sequence[Method]) -> Recommendation:
    seconds = {method: model.step_seconds(method, job) for method in [*methods, *baselines()]}
    fastest = min(methods, key=seconds.__getitem__)
    best = min(filter(may_be_recommended, methods), key=seconds.__getitem__, default=fastest)
    default = next((method for method in methods if method.is_default), best)
    chosen = default if seconds[default] <= CLOSE * seconds[best] else best
    dense = Method(DENSE)
    below = faster_below(model, job, chosen)
    best_torch = min(baselines(), key=seconds.__getitem__)
    method = dense if seconds[dense] <= WORTH * seconds[chosen] else chosen
    return Recommendation(
        method, seconds[method], seconds[dense], fastest, seconds[fastest], best_torch, seconds[best_torch], below
    )


def may_be_recommended(method: Method) -> bool:
    """Whether runs with such settings were level with dense ones. Others are recommended only if no other is named."""
    return method.of_updates or (method.density >= LEAST_DENSITY and method.recipe not in NOT_RECOMMENDED)


def faster_below(model: Model, job: Job, method: Method) -> float | None:
    """Bits per second below which a method is faster than dense; None if it never is, `FASTEST` if it always is."""

    def faster(rate: float) -> bool:
        return model.step_seconds(method, job, rate) * WORTH < model.step_seconds(Method(DENSE), job, rate)

    if faster(FASTEST):
        return FASTEST
    return crossing(faster) if faster(SLOWEST) or crossing(faster) else None


def rate_text(bits_per_second: float) -> str:
    """For example `3.4 Gbit/s`."""
    scale, unit = (1e9, "Gbit/s") if bits_per_second >= 1e9 else (1e6, "Mbit/s")
    return f"{bits_per_second / scale:.3g} {unit}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
