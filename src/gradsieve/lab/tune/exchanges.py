"""Short exchanges of every recipe: one vector from the gradient to the mean, on the ranks' own connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from gradsieve.comm import CountingComm
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.tune.fit import Constants, Sample, fit
from gradsieve.lab.tune.method import Method
from gradsieve.lab.tune.together import gathered, typical
from gradsieve.pipeline import Pipeline
from gradsieve.vector.pieces import Pieces

LARGEST_NUMEL = 6 << 20  # a group of 25 MB has no more
SMALLEST_NUMEL = 1 << 17
WARMUP_STEPS, TIMED_STEPS = 10, 5
NETWORK_SECONDS = 0.02  # that the bytes of one exchange may take: slow links get shorter vectors
BYTES_PER_SENT = 12.0  # about, per rank, of the recipes that receive most
USUAL_DENSITY = 0.01
REFERENCE = "oktopk"  # whose value codes are compared; other recipes differ by as much per byte

Tell = Callable[[str, int, int], None]


class Cell(NamedTuple):
    """One measured setting."""

    numel: int
    density: float

    @property
    def sent(self) -> int:
        return max(1, round(self.numel * self.density))


def cells(numel: int, seconds_per_byte: float, densities: Sequence[float]) -> list[Cell]:
    """Long and short vectors at the usual density, and a short one at the highest: three constants, three cells."""
    usual = min(USUAL_DENSITY, max(densities))
    room = NETWORK_SECONDS / seconds_per_byte / BYTES_PER_SENT / usual
    long = round(min(LARGEST_NUMEL, numel, max(SMALLEST_NUMEL, room)))
    short = max(1, long // 4)
    return [Cell(long, usual), Cell(short, usual), Cell(short, max(*densities, 4 * usual))]


def measure_exchanges(
    comm: CountingComm, methods: Sequence[Method], chosen: Sequence[Cell], seconds_per_byte: float, tell: Tell
) -> dict[tuple[str, str], Constants]:
    """Constants by recipe and value code. Value codes are measured for one recipe and carried over to the others."""
    gradients = Gradients(chosen[0].numel, rank=comm.rank)
    names = list(dict.fromkeys(method.recipe for method in methods if not method.of_updates))
    plain = {name: _first_code(name, methods) for name in names}
    reference = REFERENCE if REFERENCE in plain else next(iter(plain), "")
    other_codes = sorted({m.values for m in methods if m.recipe in plain} - set(plain.values()))
    coded = [(reference, code) for code in other_codes]
    wanted = [*plain.items(), *coded]
    samples: dict[tuple[str, str], list[Sample]] = {}
    for number, (name, code) in enumerate(wanted):
        tell("exchanges", number, len(wanted))
        built = Method(name, 1.0, code)
        samples[name, code] = [_sample(comm, built, cell, gradients) for cell in chosen]
    tell("exchanges", len(wanted), len(wanted))
    found = {key: fit(measured, seconds_per_byte) for key, measured in samples.items()}
    for method in methods:
        if method.recipe in plain and (method.recipe, method.values) not in found:
            own = found[method.recipe, plain[method.recipe]]
            before, after = found[reference, plain[reference]], found[reference, method.values]
            found[method.recipe, method.values] = recoded(own, before, after, chosen[0])
    return found


def recoded(own: Constants, before: Constants, after: Constants, at: Cell) -> Constants:
    """A recipe's constants with another value code, from those of a reference recipe with both codes."""
    bytes_before, bytes_after = (max(each.bytes_received(*_sizes(at)), 1e-9) for each in (before, after))
    ratio = bytes_after / bytes_before
    more_sent = own.bytes_received(*_sizes(at)) / bytes_before  # entries it encodes, relative to the reference
    change = more_sent * (after.per_sent_seconds - before.per_sent_seconds)
    return replace(
        own,
        per_sent_seconds=max(0.0, own.per_sent_seconds + change),
        bytes_per_sent=ratio * own.bytes_per_sent,
        bytes_per_halving=ratio * own.bytes_per_halving,
    )


def _sizes(cell: Cell) -> tuple[int, int]:
    return cell.numel, cell.sent


def _first_code(name: str, methods: Sequence[Method]) -> str:
    return next(method.values for method in methods if method.recipe == name)


def _sample(comm: CountingComm, method: Method, cell: Cell, gradients: Gradients) -> Sample:
    grad = torch.empty(cell.numel)
    pipeline = Pipeline(method.build(), comm)
    state = pipeline.init(Pieces([grad]))
    seconds = []
    for number in range(WARMUP_STEPS + TIMED_STEPS):
        grad.copy_(gradients.fresh()[: cell.numel])
        if number == WARMUP_STEPS:
            comm.reset()
        began = time.perf_counter()
        state = pipeline.step(grad, cell.sent, state, grad)
        seconds.append(time.perf_counter() - began)
    received = max(gathered(comm.reset().bytes_received)) / TIMED_STEPS
    return Sample(cell.numel, cell.sent, typical(seconds[WARMUP_STEPS:]), received)
