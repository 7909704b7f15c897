"""Where commands that build or use networks run: as root, or in a space of this user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import click


@dataclass(frozen=True)
class Invocation:
    """How the command line was called. It is the object of click's outermost context."""

    owns_process: bool  # started as a program, not by Python code that goes on afterwards


def enter_space() -> None:
    """Move to where networks can be built, before torch starts threads: with threads a process cannot move."""
    from gradsieve.lab.network.iproute import require_networks, require_tools
    from gradsieve.lab.network.privilege import can_build
    from gradsieve.lab.network.remains import retire_the_dead
    from gradsieve.lab.network.space import enter_new_space

    require_tools()
    if can_build():
        return
    if not _may_move():
        require_networks()
    retire_the_dead()
    enter_new_space()


def enter_space_for(networks: Iterable[str]) -> None:
    """The same if any of these names of networks needs one."""
    from gradsieve.lab.bench.site import LOOPBACK

    if any(network != LOOPBACK for network in networks):
        enter_space()


def join_space(name: str) -> None:
    """Move to where the network of this name is."""
    from gradsieve.lab.network.iproute import require_networks, require_tools
    from gradsieve.lab.network.network import standing
    from gradsieve.lab.network.privilege import can_build

    require_tools()
    guard = standing(name).guard
    if can_build() or guard is None:
        return
    if not _may_move():
        require_networks()
    guard.join()


def _may_move() -> bool:
    invocation = click.get_current_context().find_object(Invocation)
    return invocation is not None and invocation.owns_process
