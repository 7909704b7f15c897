"""What `gradsieve tune` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.errors import InputError
from gradsieve.lab.bench.site import LOOPBACK, check_networks
from gradsieve.lab.machine import require_memory
from gradsieve.lab.tune.job import find_function
from gradsieve.lab.tune.method import Method, candidates

DEFAULT_PARAMETERS = 25_000_000  # those of a ResNet-50
DEFAULT_RANKS = 4
COPIES = 7  # of the parameters that a rank holds: model, prepared gradients, buckets, residual, spare, shared model


@dataclass(frozen=True)
class TunePlan:
    """What to measure and to predict."""

    parameters: int | None = None
    model: str | None = None  # module:function
    compute_seconds: float | None = None
    recipes: Sequence[str] = ()  # none is all
    densities: Sequence[float] = ()
    values: Sequence[str] = ()
    check: bool = False

    def __post_init__(self) -> None:
        if self.model is not None and self.parameters is not None:
            raise InputError("--model has parameters of its own: leave out --parameters")
        if self.model is not None and self.compute_seconds is not None:
            raise InputError("--model is timed: leave out --compute-seconds")

    @property
    def numel(self) -> int:
        """Parameters, if no model is given."""
        return self.parameters or DEFAULT_PARAMETERS

    @property
    def methods(self) -> list[Method]:
        return candidates(self.recipes, self.densities, self.values)


def check_plan(plan: TunePlan, ranks: int, networks: Sequence[str] = (LOOPBACK,), local: bool = True) -> None:
    """Raise every error of the input before anything is measured or started."""
    if ranks < 2:
        raise InputError(f"tune needs at least 2 ranks, since one exchanges nothing, got {ranks}: use --ranks 4")
    plan.methods  # noqa: B018 - raises for unknown names
    check_networks(networks, ranks)
    if plan.model is not None:
        find_function(plan.model)
    elif plan.check:
        remedy = "use fewer --parameters or --ranks, or leave out --check"
        require_memory(4 * COPIES * plan.numel * (ranks if local else 1), remedy)
