"""Figures of every step: they add up, time is where it was spent, sinks get every step and fail softly."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import RECIPES, Constant, InputError, JsonLines, Recipe, Rules, Sink, Stats, TensorBoard
from gradsieve.comm import Comm, CountingComm
from gradsieve.engine import Engine, Settings, Step
from gradsieve.engine.groups import cut_into_groups
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from gradsieve.recipes import recipe as named_recipe
from gradsieve.sieve import Sieve
from gradsieve.stats.timing import Clock, TimedCodec, TimedComm
from gradsieve.testing import run_ranks
from gradsieve.wire import Codec
from gradsieve.wire.message import Arrived, Expected, Packed

SHAPES = {"one": (50, 60), "bias": (30,), "two": (60, 70)}
PAUSE = 0.02


def engine(comm: Comm, recipe: Recipe | str = "oktopk") -> Engine:
    parameters = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    chosen = recipe if isinstance(recipe, Recipe) else named_recipe(recipe)
    return Engine(cut_into_groups(parameters, Rules(), 0.001), Settings(chosen, Constant(0.05)), CountingComm(comm))


def run_step(made: Engine, number: int, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(10 * number + made.comm.rank)
    step = Step(made)
    for name, shape in SHAPES.items():
        grad = torch.randn(torch.Size(shape).numel(), generator=generator)
        grad[0] = torch.nan if bad and name == "bias" else grad[0]
        step.deliver(name, grad)
    for index in step.ready():
        step.exchange(index)
    step.finish()


@pytest.mark.parametrize("recipe", RECIPES)
def test_totals_are_the_sums_of_the_steps(recipe: str) -> None:
    def run(comm: Comm) -> Stats:
        made = engine(comm, recipe)
        steps = []
        for number in range(5):
            made.dense_steps_left = number == 3
            began = time.perf_counter()
            run_step(made, number, bad=number == 2)
            passed = time.perf_counter() - began
            assert made.stats.last is not None
            assert 0 < made.stats.last.seconds.total <= passed
            steps.append(made.stats.last)
        stats = made.stats
        assert [step.step for step in steps] == [0, 1, 2, 2, 3]
        assert [step.counted for step in steps] == [True, True, False, True, True]
        assert [step.dense for step in steps] == [False, False, False, True, False]
        assert (stats.steps, stats.skipped_steps, stats.dense_steps) == (4, 1, 1)
        for name, total in stats.as_dict().items():
            if name in steps[0].as_dict():
                assert sum(step.as_dict()[name] for step in steps) == pytest.approx(total), name
        assert stats.selected_entries == sum(step.selected_entries for step in steps)
        assert steps[2].selected_entries == steps[2].delivered_entries == 0
        assert steps[3].selected_entries == steps[3].sparse_numel == 50 * 60 + 60 * 70
        assert steps[3].traffic.bytes_sent == pytest.approx(steps[3].dense_bytes, abs=8)
        return stats

    results = run_ranks(3, run)
    sent = sum(stats.traffic.bytes_sent for stats in results)
    assert sent == sum(stats.traffic.bytes_received for stats in results)
    assert sum(s.traffic.messages_sent for s in results) == sum(s.traffic.messages_received for s in results) > 0
    assert len({stats.delivered_entries for stats in results}) == 1


class SlowComm(Comm):
    """Every call takes a while."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        time.sleep(PAUSE)
        return self.comm.all_reduce(tensor)

    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        for arrived in self.comm.all_to_all(buffers):
            time.sleep(PAUSE)
            yield arrived

    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        time.sleep(PAUSE)
        return self.comm.send_recv(buffer, to, source)


class SlowCodec(Codec):
    """Packing takes a while, unpacking twice that."""

    def pack(self, *arguments: Any) -> Packed:
        time.sleep(PAUSE)
        return super().pack(*arguments)

    def unpack(self, *arguments: Any) -> Arrived:
        time.sleep(2 * PAUSE)
        return super().unpack(*arguments)


def test_time_counts_where_it_is_spent() -> None:
    """Gathering of two groups: at least so long each, and not for anything else. Lower bounds only: sleeps last."""

    def run(comm: Comm) -> Stats:
        plain = named_recipe("topka")
        recipe = replace(plain, reducer=replace(plain.reducer, codec=SlowCodec()))
        made = engine(SlowComm(comm), recipe)
        run_step(made, 0)
        return made.stats

    for stats in run_ranks(2, run):
        seconds = stats.seconds
        assert seconds.encode >= 2 * PAUSE
        assert seconds.decode >= 2 * 2 * PAUSE
        assert seconds.communicate >= (2 * 2 + 1) * PAUSE
        assert min(asdict(seconds).values()) > 0


def test_only_waiting_for_an_arrival_is_communication() -> None:
    """Time is told by hand, so nothing depends on the machine."""

    class Told(Clock):
        now = 0.0

        def enter(self, phase: str) -> str:
            self._seconds[self._phase] += self.now - self._since
            self._since = self.now
            before, self._phase = self._phase, phase
            return before

    clock = Told()
    clock._since = 0.0

    class Ticking(Comm):
        rank, size = 0, 2

        def all_reduce(self, tensor: Tensor) -> Tensor:
            clock.now += 100
            raise RuntimeError("lost")

        def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
            for source, buffer in enumerate(buffers):
                clock.now += 3
                yield source, buffer

        def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
            clock.now += 7
            return buffer

    class TickingCodec(Codec):
        def unpack(self, *arguments: Any) -> Arrived:
            clock.now += 11
            return super().unpack(*arguments)

    comm, codec = TimedComm(Ticking(), clock), TimedCodec.around(TickingCodec("bf16"), clock)
    assert (codec.values, codec.indices) == ("bf16", "auto")
    expected = Expected(0, 4, 2, torch.float32, torch.device("cpu"))
    vector = gradsieve.SparseVector(torch.tensor([1, 3]), torch.tensor([1.0, 2.0]), 4)
    message = codec.pack(vector, expected, 0).message
    clock.enter("reduce")
    for _ in comm.all_to_all([message, message]):
        clock.now += 1000
        codec.unpack(message, expected, 0, 4, 1)
    comm.send_recv(message, 1, 1)
    with pytest.raises(RuntimeError, match="lost"):
        comm.all_reduce(message)
    clock.enter("idle")
    seconds = clock.take()
    assert (seconds.communicate, seconds.reduce, seconds.decode) == (3 + 3 + 7 + 100, 2000, 22)
    assert clock.take().total == 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_of_one_rank_or_of_all(tmp_path: Path) -> None:
    def run(comm: Comm) -> None:
        made = engine(comm)
        sieve = Sieve(made, sinks=[JsonLines(tmp_path / "zero.jsonl")])
        run_step(made, 0)
        sieve.report()
        sieve.add_sink(JsonLines(tmp_path / "rank-{rank}.jsonl"))
        run_step(made, 1, bad=True)
        sieve.report()
        if comm.rank == 0:  # flushed at every step
            assert len(read(tmp_path / "zero.jsonl")) == 2
        sieve.close()

    run_ranks(2, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.jsonl", "rank-1.jsonl", "zero.jsonl"]
    first, second = read(tmp_path / "zero.jsonl")
    assert (first["rank"], first["step"], first["counted"], second["counted"]) == (0, 0, True, False)
    assert first["bytes_sent"] > 0
    assert first["select_seconds"] > 0
    assert read(tmp_path / "rank-0.jsonl") == [second]
    assert [line["rank"] for line in read(tmp_path / "rank-1.jsonl")] == [1]


class Failing(Sink):
    def open(self, rank: int) -> None:
        pass

    def write(self, stats: Stats) -> None:
        raise OSError("no space left on device")

    def close(self) -> None:
        raise OSError("nor for this")

    def __repr__(self) -> str:
        return "Failing()"


def test_a_sink_that_fails_is_named_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(comm: Comm) -> None:
        made = engine(comm)
        sieve = Sieve(made, sinks=[Failing(), JsonLines(tmp_path / "a.jsonl")])
        for number in range(3):
            run_step(made, number)
            sieve.report()
        sieve.close()

    with caplog.at_level(logging.ERROR, "gradsieve"):
        run_ranks(2, run)
    assert len(read(tmp_path / "a.jsonl")) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "rank 0: Failing() failed and gets no more steps; training goes on: OSError: no space left on device",
        "rank 0: Failing() failed and gets no more steps; training goes on: OSError: nor for this",
    ]


class Writer:
    """What is asked of a SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))

    def flush(self) -> None:
        pass


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    writer = Writer()

    def run(comm: Comm) -> None:
        made = engine(comm)
        sieve = Sieve(made, sinks=[TensorBoard(writer, prefix="net"), TensorBoard(tmp_path / "board")])
        for number in range(3):
            run_step(made, number, bad=number == 1)
            sieve.report()
        sieve.close()

    run_ranks(2, run)
    assert [step for step, _ in writer.scalars["net/bytes_sent"]] == [0, 1, 2]
    assert [value for _, value in writer.scalars["net/counted"]] == [1, 0, 1]
    (events,) = (tmp_path / "board").iterdir()
    assert b"gradsieve/select_seconds" in events.read_bytes()


def test_sinks_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = run_ranks(1, engine)
    with pytest.raises(InputError, match="rank 0: .*missing/a.jsonl cannot be written: No such file"):
        Sieve(made, sinks=[JsonLines(tmp_path / "missing" / "a.jsonl")])
    with pytest.raises(InputError, match="a sink must be a gradsieve.Sink, got str"):
        Sieve(made).add_sink("a.jsonl")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="log directory or a SummaryWriter, got int"):
        TensorBoard(3)

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(gradsieve.stats.sinks, "import_module", absent)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="pip install tensorboard .*gradsieve.JsonLines"):
        TensorBoard(tmp_path)


def ddp_job(process: RankProcess, folder: str) -> None:
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
    sieve = gradsieve.attach(model, "oktopk", density=0.05, group_mb=0.016, sinks=[JsonLines(f"{folder}/{{rank}}")])
    assert sieve.stats.buffer_bytes == 64 * 4 * 2 + 8
    assert "sent by DDP itself: 520 bytes of buffers" in repr(sieve)
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
    sieve.flush()
    lines = read(Path(folder) / str(process.rank))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert sum(line["bytes_sent"] for line in lines) == sieve.stats.traffic.bytes_sent > 0
    assert all(line["communicate_seconds"] > 0 for line in lines)
    sieve.close()


def test_under_ddp(tmp_path: Path) -> None:
    run_rank_processes(2, ddp_job, str(tmp_path))
