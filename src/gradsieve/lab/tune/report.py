"""A tuning as rows of a table, as sentences and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from gradsieve.lab.bench.report import Column, Row, megabytes, milliseconds, thousands
from gradsieve.lab.tune.method import DENSE, Method
from gradsieve.lab.tune.recommend import faster_below, rate_text

if TYPE_CHECKING:
    from gradsieve.lab.tune.session import Tuning

SHOWN = 6  # of this library's methods, unless all are asked for

COLUMNS = (
    Column("method", "method"),
    Column("seconds", "step time", milliseconds),
    Column("speedup_over_dense", "vs dense", lambda value: f"{value:.3g}x"),
    Column("exchange_seconds", "exchange alone", milliseconds),
    Column("bytes_received_per_rank", "received per rank", megabytes),
    Column("faster_below", "faster than dense", lambda value: below_text(value)),
    Column("timed", "prediction from"),
)


def rows(tuning: Tuning, all_methods: bool = True) -> list[Row]:
    """One row per method, the fastest first; or only the best few, the default, dense and torch's hooks."""
    ranked = tuning.ranked
    own = [method for method in ranked if not method.is_baseline]
    shown = set(own if all_methods else own[:SHOWN]) | {m for m in ranked if m.is_baseline or m.is_default}
    dense = tuning.seconds(Method(DENSE))
    return [_row(tuning, method, dense) for method in ranked if method in shown]


def _row(tuning: Tuning, method: Method, dense: float) -> Row:
    model, job = tuning.model, tuning.job
    seconds = tuning.seconds(method)
    row: Row = {
        "method": method.name,
        "recipe": method.recipe,
        "density": None if method.is_baseline else method.density,
        "values": method.values or None,
        "peer": method.is_baseline,
        "exchanges": "updates" if method.of_updates else "gradients",
        "seconds": seconds,
        "exchange_seconds": model.exchange_seconds(method, job),
        "speedup_over_dense": dense / seconds,
        "bytes_received_per_rank": model.bytes_received(method, job),
        "timed": "its own steps" if method.is_baseline or method in model.calibration else "its recipe's exchanges",
        "line": method.line,
    }
    if method.recipe != DENSE:
        row["faster_below"] = faster_below(model, job, method)
    return row


def below_text(bits_per_second: float | None) -> str:
    """For example `below 3.4 Gbit/s`."""
    if bits_per_second is None:
        return "never"
    return "always" if bits_per_second >= 1e12 else f"below {rate_text(bits_per_second)}"


def measured_sentences(tuning: Tuning) -> Iterator[str]:
    """What was measured of the world, one line each."""
    physical = tuning.physical
    slowest = min(physical.pairs, key=lambda pair: pair.bits_per_second)
    fastest = max(physical.pairs, key=lambda pair: pair.bits_per_second)
    where = "one machine: these are its memory, not a network" if physical.on_one_machine else "several hosts"
    yield f"{tuning.size} ranks on {where}."
    yield f"Latency: {milliseconds(physical.latency_seconds)} one way (median over {len(physical.pairs)} pairs)."
    both = min(pair.both_ways_bits_per_second for pair in physical.pairs)
    yield (
        f"Bandwidth: {rate_text(slowest.bits_per_second)} between ranks {slowest.low} and {slowest.high}, the slowest "
        f"pair; {rate_text(fastest.bits_per_second)} between {fastest.low} and {fastest.high}, the fastest; "
        f"{rate_text(both)} in each direction with both at once (slowest pair); each rank receives "
        f"{rate_text(physical.all_pairs_bits_per_second)} while all send to all."
    )
    yield (
        f"Memory: {physical.memory_bytes_per_second / 1e9:.3g} GB/s per rank. Selection: "
        f"{physical.select_entries_per_second / 1e6:,.0f} million entries per second and rank."
    )
    for host, count in Counter(map(str, physical.hosts)).items():
        yield f"NICs: {host}" + (f", on each of {count} hosts." if count > 1 else ".")


def job_sentence(tuning: Tuning) -> str:
    job = tuning.job
    computing = f"{milliseconds(job.compute_seconds)} of computing" if job.compute_seconds else "no computing counted"
    return f"{thousands(job.numel)} parameters, {computing}"


def to_json(tuning: Tuning) -> Row:
    """Everything, for `--json`."""
    physical, advice = tuning.physical, tuning.recommendation
    hosts = [asdict(host) for host in physical.hosts]
    return {
        "network": tuning.network,
        "ranks": tuning.size,
        "parameters": tuning.job.numel,
        "compute_seconds": tuning.job.compute_seconds,
        "measured": {
            **{name: value for name, value in vars(physical).items() if name not in ("pairs", "hosts")},
            "latency_seconds": physical.latency_seconds,
            "pairs": [pair._asdict() for pair in physical.pairs],
            "hosts": [{**host, "nics": None if host["physical"] is None else len(host["physical"])} for host in hosts],
        },
        "methods": rows(tuning),
        "recommendation": {
            "method": advice.method.name,
            "line": advice.method.line,
            "seconds": advice.seconds,
            "dense_seconds": advice.dense_seconds,
            "dense_is_better": advice.keeps_dense,
            "faster_below_bits_per_second": advice.faster_below,
            "sentences": advice.sentences,
        },
        "check": [each.to_json() for each in tuning.checked],
    }


def plotted(tuning: Tuning, most: int = 4) -> dict[str, Method]:
    """Methods to draw: what was run for real, the best few of different recipes, the default, dense, torch's hooks."""
    chosen: dict[str, Method] = {}
    for method in tuning.ranked:
        if not method.is_baseline and len(chosen) < most:
            chosen.setdefault(method.recipe, method)
    checked = [each.method for each in tuning.checked]
    default = [method for method in tuning.methods if method.is_default]
    torch_methods = [method for method in tuning.ranked if method.is_baseline]
    return {method.name: method for method in dict.fromkeys([*checked, *chosen.values(), *default, *torch_methods])}
