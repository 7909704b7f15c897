"""A rank of a DDP job that is killed at a chosen moment, and what the others are told.

Processes come from a fork server that has imported torch and run nothing: six of them start in a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import gradsieve
from gradsieve import Sieve
from support.comm_contract import prepared_processes
from support.ddp_models import attached, loss_of, train

GOOD_STEPS = 2
TIMEOUT_SECONDS = 20.0
GIVEN_UP_SECONDS = 150.0


def die(folder: Path) -> None:
    (folder / "killed-at").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(target: Any, name: str, number: int, folder: Path, after: bool = False) -> None:
    """Die in the call of this number, before it does anything or after it has done everything."""
    call: Callable[..., Any] = getattr(target, name)
    calls = []

    def watched(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not after:
            die(folder)
        result = call(*arguments, **options)
        if len(calls) == number:
            die(folder)
        return result

    object.__setattr__(target, name, watched)


def in_exchange(sieve: Sieve, number: int, folder: Path) -> None:
    """Die in an exchange of this number: what is for the next rank has been sent, the rest has not."""
    comm = sieve.engine.comm.comm
    exchange = comm.all_to_all
    calls = []

    def watched(buffers: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            transport = comm._transport
            assert transport.in_memory
            transport._send([comm._bytes(buffer) for buffer in buffers], [(comm.rank + 1) % comm.size])
            die(folder)
        yield from exchange(buffers)

    comm.all_to_all = watched


def arm(moment: str, model: Any, sieve: Sieve, folder: Path) -> None:
    """Have this rank die at a moment of its next step; exchanges 1 and 2 are the scatter and gather of a group."""
    engine = sieve.engine
    recipe = engine.settings.recipe
    if moment == "between steps":
        die(folder)
    elif moment == "backward":
        model.module.first.weight.register_hook(lambda grad: die(folder))
    elif moment == "before the exchange":
        on_call(engine, "exchange", 1, folder)
    elif moment == "select":
        on_call(recipe.selector, "select", 2, folder)
    elif moment == "scatter":
        in_exchange(sieve, 1, folder)
    elif moment == "gather":
        in_exchange(sieve, 2, folder)
    elif moment == "all_reduce":
        on_call(engine.comm.comm, "all_reduce", 1, folder)
    elif moment == "tree":
        on_call(engine.comm.comm, "send_recv", 2, folder)
    else:
        raise AssertionError(moment)


class Job(NamedTuple):
    """Who is killed when, in which job."""

    moment: str
    size: int
    recipe: str
    victim: int = 2


def rank_main(rank: int, job: Job, folder: Path, store: str) -> None:
    moment, size, recipe, victim = job
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    model, sieve, optimizer = attached(recipe, ddp={"bucket_cap_mb": 0.01})
    train(model, range(GOOD_STEPS), rank, optimizer)
    dist.barrier()
    if rank == victim:
        arm(moment, model, sieve, folder)
    try:
        loss_of(model, rank, GOOD_STEPS).backward()
    except gradsieve.PeerLostError as error:
        told = {"text": str(error), "peer": error.peer, "phase": error.phase, "group": error.group}
        told["seconds"] = time.time() - float((folder / "killed-at").read_text())
        (folder / f"told-{rank}").write_text(json.dumps(told))
        raise SystemExit(3) from error


def store_of(job: Job, folder: Path) -> str:
    """Where ranks meet. That of rank 0 lives in rank 0, so that nobody can ask it when rank 0 is the one killed."""
    if job.victim:
        return f"file://{folder}/store"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def outcomes(job: Job, folder: Path) -> dict[int, dict[str, Any]]:
    """What each survivor was told, with its exit code."""
    context = prepared_processes()
    store = store_of(job, folder)
    ranks = [context.Process(target=rank_main, args=(rank, job, folder, store)) for rank in range(job.size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + GIVEN_UP_SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
    assert not late, f"ranks {late} were still running after {GIVEN_UP_SECONDS:g} s"
    assert ranks[job.victim].exitcode == -signal.SIGKILL
    told = {}
    for rank, process in enumerate(ranks):
        if rank != job.victim:
            file = folder / f"told-{rank}"
            assert file.exists(), f"rank {rank} ended with {process.exitcode} and was told nothing"
            told[rank] = {**json.loads(file.read_text()), "exit": process.exitcode}
    return told
