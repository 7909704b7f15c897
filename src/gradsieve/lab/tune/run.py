"""Starting a tuning: in local rank processes, or as one rank of the world that a launcher has created."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsieve.errors import InputError
from gradsieve.lab.bench.site import LOOPBACK, run_on
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS, RankProcess
from gradsieve.lab.train.world import World, found_world, joined
from gradsieve.lab.tune.plan import DEFAULT_RANKS, TunePlan, check_plan
from gradsieve.lab.tune.reach import check_pairs
from gradsieve.lab.tune.session import Tuning, tune_rank
from gradsieve.lab.tune.together import AgreedError

Tell = Callable[[str, int, int], None]


class SilentError(Exception):
    """This rank failed with an error that rank 0 prints."""


def tune(plan: TunePlan, ranks: int | None, networks: Sequence[str], tell: Tell) -> list[Tuning]:
    """One tuning per network. Under a launcher this process is one rank, and only rank 0 gets the result."""
    world = found_world()
    if world is not None:
        try:
            return _in_world(plan, world, ranks, networks, tell)
        except AgreedError:
            if world.rank == 0:
                raise
            raise SilentError from None
    size = DEFAULT_RANKS if ranks is None else ranks
    networks = networks or (LOOPBACK,)
    check_plan(plan, size, networks)
    return [run_on(name, size, _local, plan, name, on_report=lambda report: tell(*report))[0] for name in networks]


def _local(process: RankProcess, plan: TunePlan, network: str) -> Tuning | None:
    def tell(what: str, done: int, total: int) -> None:
        if process.rank == 0:
            process.report((what if network == LOOPBACK else f"{network}: {what}", done, total))

    tuning = tune_rank(process.rank, plan, network, tell)
    return tuning if process.rank == 0 else None


def _in_world(plan: TunePlan, world: World, ranks: int | None, networks: Sequence[str], tell: Tell) -> list[Tuning]:
    if networks:
        raise InputError(f"{world.launcher} has started this process, and --network starts ranks itself: leave it out")
    if ranks is not None and ranks != world.size:
        raise InputError(
            f"{world.launcher} has started {world.size} processes, but --ranks is {ranks}: leave out --ranks"
        )
    check_plan(plan, world.size, local=False)
    silent: Tell = lambda what, done, total: None  # noqa: E731
    failure: AgreedError | None = None
    with joined(world, "cpu", TIMEOUT_SECONDS, before=check_pairs):
        try:
            tuning = tune_rank(world.rank, plan, world.launcher, tell if world.rank == 0 else silent)
        except AgreedError as error:
            failure = error  # raised outside: all ranks are here, and leave the group in order
    if failure is not None:
        raise failure
    return [tuning] if world.rank == 0 else []
