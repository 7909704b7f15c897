"""`gradsieve lab enter`: a command that may build networks."""

from __future__ import annotations

import os
from dataclasses import dataclass

import click

from gradsieve.cli.lab_space import enter_space
from gradsieve.cli.parsing import parsed_into
from gradsieve.errors import InputError


@dataclass(frozen=True)
class LabEnterOptions:
    """Parsed options of `gradsieve lab enter`."""

    command: tuple[str, ...]  # empty for a shell


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@parsed_into(LabEnterOptions)
def enter(options: LabEnterOptions) -> None:
    """Run COMMAND, or a shell, where it may build networks.

    Without root this is a user namespace: COMMAND seems to be root's there, but has only your rights. Networks that a
    script builds by `gradsieve.lab.network.Network` need it, since a running script cannot move there. Root needs none
    of this: COMMAND is simply run.

    \b
    Example:
      gradsieve lab enter -- python script.py
    """
    enter_space()
    command = options.command or (os.environ.get("SHELL", "sh"),)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(f"{command[0]!r} cannot be run: {error.strerror}") from None
