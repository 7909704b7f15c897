"""Whole training steps, timed briefly: baselines, updates, the cost of DDP's hook, and the best candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradsieve.comm import CountingComm
from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.baselines.baseline import dense_bytes
from gradsieve.lab.tune.exchanges import LARGEST_NUMEL, Cell, cells, measure_exchanges
from gradsieve.lab.tune.fit import Constants, Sample, fit, nonnegative
from gradsieve.lab.tune.job import Job, stand_in_job, stand_in_work
from gradsieve.lab.tune.method import UPDATE_DENSITIES, Method, baselines
from gradsieve.lab.tune.physical import Physical
from gradsieve.lab.tune.predict import Model
from gradsieve.lab.tune.stand_in import stand_in_shapes
from gradsieve.lab.tune.together import decided
from gradsieve.lab.tune.training import timed_steps

LONGEST_STEP_SECONDS = 0.15  # of a step that is timed here: slow links get smaller stand-ins
SMALLEST_NUMEL = 1 << 15
DENSE_STEP_SECONDS = 1.0  # of each of the two dense steps before PowerSGD begins
TORCH_STEPS = (3, 4)  # to warm up, and timed: PowerSGD begins at its third step
OWN_STEPS = (14, 7)  # connections are made at the 13th call
TOP = 3  # methods that must have been timed themselves before they are called the best
MOST_CALIBRATED = 10
CANDIDATE_NUMEL = 32 << 20  # entries at most of a candidate's stand-in: several groups, as the model itself has

Tell = Callable[[str, int, int], None]
BITS_PER_SENT = 2.5  # about, of updates


class Timed(NamedTuple):
    """A stand-in's size and what its steps took."""

    numel: int
    seconds: float
    bytes_received: float


def measured_model(
    comm: CountingComm, physical: Physical, job: Job, methods: Sequence[Method], densities: Sequence[float], tell: Tell
) -> Model:
    """Everything that is timed. All ranks call it together."""
    per_byte = physical.seconds_per_byte
    chosen = decided(lambda: cells(max(job.groups(of_updates=False).sparse, default=job.numel), per_byte, densities))
    exchanges = measure_exchanges(comm, methods, chosen, per_byte, tell)
    model = Model(comm.size, physical.all_pairs_bits_per_second, exchanges)
    torch_methods = baselines()
    for number, method in enumerate(torch_methods):
        tell("training steps", number, len(torch_methods) + 2)
        model.baselines[method.recipe] = _baseline(method, comm, job, per_byte)
    tell("training steps", len(torch_methods), len(torch_methods) + 2)
    if exchanges:
        model = replace(model, hook=_hook(model, next(m for m in methods if not m.of_updates), comm, chosen))
    tell("training steps", len(torch_methods) + 1, len(torch_methods) + 2)
    if any(method.of_updates for method in methods):
        model = replace(model, updates=_updates(comm, job, per_byte))
    tell("training steps", len(torch_methods) + 2, len(torch_methods) + 2)
    return _calibrated(model, job, methods, comm, tell)


def _timed(method: Method, numel: int, comm: CountingComm) -> Timed:
    steps = TORCH_STEPS if method.is_baseline else OWN_STEPS
    return Timed(numel, *timed_steps(method, stand_in_work(numel, 0.0, comm.rank), *steps))


def _baseline(method: Method, comm: CountingComm, job: Job, per_byte: float) -> Constants:
    """Times of two sizes; a bucket of 25 MB at most, so that the fixed time is that of one bucket."""
    largest = BASELINES[method.recipe].bytes_received(stand_in_shapes(LARGEST_NUMEL), comm.size)
    bytes_per_entry = max(largest, 1) / LARGEST_NUMEL
    first_steps = DENSE_STEP_SECONDS / (dense_bytes([(1,)], comm.size) * per_byte)
    long = decided(lambda: _size(min(job.numel, round(first_steps)), per_byte * bytes_per_entry))
    samples = []
    for numel in dict.fromkeys((long, max(1, long // 4))):
        seconds = _timed(method, numel, comm).seconds
        buckets = 1 if BASELINES[method.recipe].bucket_mb else stand_in_job(numel, 0.0).num_buckets()
        received = BASELINES[method.recipe].bytes_received(stand_in_shapes(numel), comm.size)
        samples.append(Sample(numel // buckets, 0, seconds / buckets, received / buckets))
    return fit(samples, per_byte)


def _size(numel: int, seconds_per_entry: float, largest: int = LARGEST_NUMEL) -> int:
    """As many entries as a step of `LONGEST_STEP_SECONDS` exchanges, at most `largest` or the model."""
    room = LONGEST_STEP_SECONDS / seconds_per_entry
    return round(min(largest, numel, max(SMALLEST_NUMEL, room)))


def _hook(model: Model, method: Method, comm: CountingComm, chosen: Sequence[Cell]) -> Constants:
    """What a training step takes beyond the exchanges that have been timed by themselves."""
    usual = replace(method, density=chosen[0].density)
    system, wanted = [], []
    for cell in chosen[:2]:
        seconds = _timed(usual, cell.numel, comm).seconds
        beyond = seconds - model.exchange_seconds(usual, stand_in_job(cell.numel, 0.0))
        system.append([1 / seconds, cell.numel / seconds])
        wanted.append(beyond / seconds)
    import numpy as np

    fixed, per_entry = nonnegative(np.array(system), np.array(wanted))
    return Constants(fixed, per_entry)


def _updates(comm: CountingComm, job: Job, per_byte: float) -> Constants:
    long = decided(lambda: _size(job.numel, per_byte * BITS_PER_SENT / 8))
    samples = []
    for numel, density in [*((long, each) for each in UPDATE_DENSITIES), (max(1, long // 4), UPDATE_DENSITIES[1])]:
        timed = _timed(_update(density), numel, comm)
        groups = len(stand_in_job(numel, 0.0).groups(of_updates=True).sparse)
        sent = max(1, round(numel * density))
        samples.append(Sample(numel // groups, sent // groups, timed.seconds / groups, timed.bytes_received / groups))
    return fit(samples, per_byte)


def _update(density: float) -> Method:
    return Method("onebit", density, "bit")


def _calibrated(model: Model, job: Job, methods: Sequence[Method], comm: CountingComm, tell: Tell) -> Model:
    """Time the best candidates themselves, until the best three all have been."""
    for number in range(MOST_CALIBRATED):
        tell("best candidates", number, MOST_CALIBRATED)
        method = decided(lambda model=model: next_to_time(model, job, methods))  # type: ignore[misc]
        if method is None:
            break
        per_entry = model.exchange_seconds(method, job) / job.numel
        numel = decided(lambda per_entry=per_entry: _size(job.numel, per_entry, CANDIDATE_NUMEL))  # type: ignore[misc]
        seconds = _timed(method, numel, comm).seconds
        expected = model.calibrated(method, 1.0).step_seconds(method, stand_in_job(numel, 0.0))
        model = model.calibrated(method, seconds / expected)
    tell("best candidates", MOST_CALIBRATED, MOST_CALIBRATED)
    return model


def next_to_time(model: Model, job: Job, methods: Sequence[Method]) -> Method | None:
    """The default, and then the best of those that have not been timed, while they are among the best three."""
    ranked = sorted(methods, key=lambda method: model.exchange_seconds(method, job))
    first = [method for method in methods if method.is_default]
    for method in [*first, *ranked[:TOP], *sorted(methods, key=lambda m: model.step_seconds(m, job))[:TOP]]:
        if method not in model.calibration:
            return method
    return None
