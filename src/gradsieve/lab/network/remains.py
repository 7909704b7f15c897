"""Networks in spaces that this process is not in: looked at and removed by a process that joins their space for it.

There is no way back from a space, nor from one space into another. So the process that asks stays outside.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from gradsieve.lab.network.claim import Claim, held, known_names, read_claim
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.iproute import NAMESPACES
from gradsieve.lab.network.network import remove
from gradsieve.lab.network.privilege import can_build
from gradsieve.lab.network.space import Member

T = TypeVar("T")

GUARD_END_SECONDS = 2.0


def beside(claim: Claim, work: Callable[[], T]) -> T:
    """Run `work` where the claim's namespaces are: here, or in a process that joins their space."""
    if can_build():
        return work()
    member = _member(claim)
    if member is None:
        raise NetworkError(f"the laboratory {claim.name!r} is gone, with the processes that kept it")
    # Forked, which is safe here: the commands that come here have one thread and have not imported torch.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        return executor.submit(_joined, member, work).result()


def retire(claim: Claim) -> None:
    """Remove everything a claim lists, then the claim. The caller holds its lock."""
    if can_build():
        remove(claim)  # if it is in another space, the guard there ends without the claim
        return
    if _member(claim) is None:
        claim.forget()
        return
    beside(claim, partial(remove, claim))
    deadline = time.monotonic() + GUARD_END_SECONDS
    while claim.guard is not None and claim.guard.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


def retire_the_dead() -> None:
    """Remove what killed processes of this user left, before this process enters a space, from where it could not."""
    for name in known_names():
        if _is_dead(read_claim(name)):
            with suppress(NetworkError), held(name):
                claim = read_claim(name)
                if claim is not None and _is_dead(claim):
                    retire(claim)


def _is_dead(claim: Claim | None) -> bool:
    return claim is not None and not claim.is_up and not Path(f"/proc/{claim.process}").exists()


def _member(claim: Claim) -> Member | None:
    """A process in the claim's space: its guard, or if that was killed, any that has the switch under its name."""
    if claim.guard is not None and claim.guard.is_alive():
        return claim.guard
    name = NAMESPACES.relative_to("/") / claim.site.switch
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, NetworkError):  # it has ended, or is another user's
            if (process / "root" / name).exists():
                return Member.of(int(process.name))
    return None


def _joined(member: Member, work: Callable[[], T]) -> T:
    member.join()
    return work()
