"""Benchmarks report in one form, on gradients worth measuring, and rank processes that fail are named."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch

from gradsieve import RECIPES, SELECTORS
from gradsieve.cli import main
from gradsieve.comm import FRAME_BYTES, TorchComm
from gradsieve.errors import InputError
from gradsieve.lab import machine
from gradsieve.lab.bench.contest import contest
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.reduce import ReducePlan, bench_reduce
from gradsieve.lab.bench.select import SieveContender
from gradsieve.lab.rank_processes import RankProcess, RankProcessError, run_rank_processes
from gradsieve.wire.message import OVERHEAD_BYTES

ENVIRONMENT = {"gradsieve", "python", "torch", "numpy", "numba", "cpu", "cores", "platform", "date"}
ROW = {"numel", "density", "ranks", "seconds", "repeats", "threads"}


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"environment", "results"}
    assert set(report["environment"]) >= ENVIRONMENT
    assert all(set(row) >= ROW and row["seconds"] > 0 for row in report["results"])
    return list(report["results"])


def test_select_rows(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    rows = report_of(
        capsys, "bench", "select", "--numel", "2000", "3K", "--density", "0.01", "--threads", "1", "2", "--repeats", "3"
    )
    assert torch.get_num_threads() == before
    methods = [*SELECTORS, "torch.topk", "add_"]
    assert [row["method"] for row in rows[: len(methods)]] == methods
    assert [(row["numel"], row["threads"]) for row in rows[:: len(methods)]] == [
        (2000, 1),
        (2000, 2),
        (3000, 1),
        (3000, 2),
    ]
    for row in rows:
        assert row["ranks"] == 1
        assert row["repeats"] == len(row["raw_seconds"]) == 3
        assert row["step"] == "ordinary"
        add = next(r for r in rows if r["method"] == "add_" and all(r[c] == row[c] for c in ("numel", "threads")))
        assert row["ratio_to_add_"] == pytest.approx(row["seconds"] / add["seconds"])
    exact = next(row for row in rows if row["method"] == "exact")
    assert exact["k"] == 20
    assert exact["picked_over_k"] == 1


@pytest.mark.parametrize("name", SELECTORS)
def test_a_timed_selection_leaves_the_gradient_to_the_next_method(name: str) -> None:
    """All methods step on the same gradient. One that cleared it once left zeros to all others, which were timed."""
    grad = Gradients(5000).fresh()
    before = grad.clone()
    selected = SieveContender(SELECTORS[name](), grad, 50).step(grad)
    assert torch.equal(grad, before)
    assert selected.nnz > 0


def test_select_of_one_method_keeps_the_baselines_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "select", "--method", "dgc", "--numel", "1000", "--threads", "1", "--repeats", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(name in captured.out for name in ("dgc", "torch.topk", "add_"))
    assert "gaussian" not in captured.out


def test_reduce_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report_of(capsys, "bench", "reduce", "--ranks", "2", "--numel", "5000", "--repeats", "2")
    assert [row["recipe"] for row in rows] == ["gloo all_reduce", *RECIPES]
    by_name = {row["recipe"]: row for row in rows}
    for row in rows:
        assert row["ranks"] == 2
        assert row["repeats"] == len(row["raw_seconds"]) == 2
        assert row["speedup_over_dense"] == pytest.approx(by_name["gloo all_reduce"]["seconds"] / row["seconds"])
    for name in ("gloo all_reduce", "dense"):
        assert by_name[name]["bytes_received_per_rank"] == 2 * 4 * 5000 // 2
        assert by_name[name]["messages_per_rank"] == 2
        assert by_name[name]["calls_per_step"] == 1
    assert by_name["topka"]["messages_per_rank"] == 1
    # Between processes of one machine entries go as they are.
    assert 8 * 50 < by_name["topka"]["bytes_received_per_rank"] <= 8 * 50 + OVERHEAD_BYTES + FRAME_BYTES
    assert 0 < by_name["oktopk"]["calls_per_step"] <= 4


def test_optimizer_rows(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench optimizer --numel 3000 --tensors 2 7 --threads 1 --repeats 3 --json"
    assert main(command.split()) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["method"], row["tensors"]) for row in rows] == [
        (name, tensors) for tensors in (2, 7) for name in ("torch.optim.AdamW", "gradsieve.AdamW")
    ]
    for row in rows:
        assert (row["numel"], row["ranks"], row["threads"], len(row["raw_seconds"])) == (3000, 4, 1, 8)
        assert row["mean_seconds"] == pytest.approx(sum(row["raw_seconds"]) / 8)
    assert [row["ratio_to_torch"] for row in rows[::2]] == [1.0, 1.0]


def test_optimizer_refuses_more_tensors_than_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optimizer", "--numel", "5", "--tensors", "7"]) == 2
    assert "5 entries do not fill 7 tensors" in capsys.readouterr().err


def test_gradients_are_new_each_time_heavy_tailed_and_reproducible() -> None:
    numel = 200_000
    first, again = Gradients(numel), Gradients(numel)
    seen = [first.fresh().clone() for _ in range(7)]
    assert all(torch.equal(grad, again.fresh()) for grad in seen)
    assert not any(torch.equal(a, b) for number, a in enumerate(seen) for b in seen[:number])
    x = seen[0].double()
    kurtosis = float(((x - x.mean()) ** 4).mean() / x.var() ** 2)
    assert kurtosis > 4  # 3 is normal
    block_scales = x.view(100, -1).std(dim=1)
    assert float(block_scales.max() / block_scales.min()) > 5


def test_gradients_of_ranks_share_a_part() -> None:
    mine, theirs = (Gradients(100_000, rank=rank) for rank in (0, 1))
    for _ in range(4):
        both = torch.stack([mine.fresh(), theirs.fresh()])
        assert 0.3 < float(torch.corrcoef(both)[0, 1]) < 0.7


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 100])
def test_gradients_of_any_length(numel: int) -> None:
    gradients = Gradients(numel)
    assert all(gradients.fresh().shape == (numel,) for _ in range(5))


def test_contest_gives_all_the_same_gradients_after_their_warm_up() -> None:
    class Recorder:
        def __init__(self, warmup_steps: int) -> None:
            self.warmup_steps = warmup_steps
            self.calls = 0

        def step(self, grad: torch.Tensor) -> float:
            self.calls += 1
            return float(grad.sum())

    slow, quick = Recorder(5), Recorder(1)
    told: list[tuple[str, int, int]] = []
    measured = contest("x", {"slow": slow, "quick": quick}, Gradients(50), 3, lambda *now: told.append(now))
    assert (slow.calls, quick.calls) == (8, 4)
    assert measured["slow"] == measured["quick"]
    assert len(set(measured["slow"])) == 3
    assert told[-1] == ("x", 8, 8)


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2_000_000_000)
    machine.require_memory(1_999_999_999, "")
    with pytest.raises(InputError, match=r"about 3\.0 GB of memory, 2\.0 GB are available: use less"):
        machine.require_memory(3_000_000_000, "use less")
    monkeypatch.setattr(machine, "available_bytes", lambda: None)
    machine.require_memory(10**18, "")


@pytest.mark.parametrize(
    ("recipes", "baselines", "vectors"),
    [(["dense"], [], 4), (["oktopk"], [], 6), (["dgc"], [], 8), (["oktopk", "dgc"], ["bf16"], 15)],
)
def test_room_is_asked_for_what_recipes_and_baselines_keep(
    monkeypatch: pytest.MonkeyPatch, recipes: list[str], baselines: list[str], vectors: int
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    plan = ReducePlan(recipes, numels=[10**9], densities=[0.01], ranks=[1], repeats=1, baselines=baselines)
    with pytest.raises(InputError, match=f"needs about {4 * vectors}.0 GB of memory"):
        bench_reduce(plan)


def work(process: RankProcess, how: str) -> None:
    """Rank 1 fails in the way it is told, while rank 0 waits for it."""
    comm = TorchComm(timeout_seconds=30)
    if process.rank == 1:
        process.report(how)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("no way")
    comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raise", r"^rank 1: ZeroDivisionError: no way \(test_bench\.py, line \d+\)$"),
        ("kill", r"^rank 1 ended without an error message, by signal SIGKILL \(is the machine out of memory\?\)$"),
    ],
)
def test_the_rank_process_that_failed_is_named_not_the_one_that_lost_it(how: str, sentence: str) -> None:
    heard: list[str] = []
    with pytest.raises(RankProcessError, match=sentence):
        run_rank_processes(2, work, how, on_report=heard.append)
    assert heard == [how]
    assert not multiprocessing.active_children()


def test_no_ranks_at_all() -> None:
    with pytest.raises(InputError, match="ranks must be at least 1, got 0"):
        run_rank_processes(0, work, "raise")


def test_wire_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "wire", "--numel", "300k", "--ranks", "2", "4", "--values", "exact", "int8", "--repeats", "2"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    traffic = [row for row in rows if row["kind"] == "traffic"]
    assert [(row["ranks"], row["values"]) for row in traffic] == [(2, "exact"), (2, "int8"), (4, "exact"), (4, "int8")]
    for row in traffic:
        bound = 2 * 3000 * (row["ranks"] - 1) / row["ranks"] * 4
        assert row["of_lower_bound"] == pytest.approx(row["bytes_received_per_rank"] / bound)
        assert 1.5 < row["bytes_per_entry"] < 8
    assert traffic[1]["bytes_received_per_rank"] < 0.7 * traffic[0]["bytes_received_per_rank"]
    indices = [row for row in rows if row["kind"] == "indices"]
    assert len(indices) == 8
    assert all(row["of_entropy"] < 1.25 for row in indices)
    speed = [row for row in rows if row["kind"] == "speed"]
    assert all(row["encode_gigabytes_per_second"] > 0 < row["decode_gigabytes_per_second"] for row in speed)
    updates = [row for row in rows if row["kind"] == "updates"]
    assert [(row["ranks"], row["density"]) for row in updates] == [
        (ranks, density) for ranks in (2, 4) for density in (1.0, 0.5, 0.25, 0.125)
    ]
    for row in updates:
        assert row["fewer_bytes"] == pytest.approx(32 / row["density"], rel=0.1), "one bit an entry, and headers"


def test_wire_refuses_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", "--values", "int7"]) == 2
    assert "unknown value code 'int7'; did you mean 'int8'" in capsys.readouterr().err


def test_overlap_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "overlap", "--width", "4", "--group-mb", "0.02", "--repeats", "1", "--ranks", "2"]
    rows = {row["method"]: row for row in report_of(capsys, *arguments)}
    assert list(rows) == ["dense DDP", "nothing sent", "oktopk, one group", "oktopk, 0.02 MB", "compute"]
    one, several = rows["oktopk, one group"], rows["oktopk, 0.02 MB"]
    assert one["num_groups"] < several["num_groups"]
    shows = several["seconds"] - several["compute_seconds"]
    assert several["hidden_share"] == pytest.approx(1 - shows / several["exchange_seconds"])
