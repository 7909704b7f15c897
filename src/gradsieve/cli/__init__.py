"""The `gradsieve` command. Heavy modules such as torch are imported only by the commands that need them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence

LAB_MODULES = ("click", "rich", "matplotlib", "sklearn", "tokenizers", "PIL")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `gradsieve` command with `arguments`, or those of the process. Returns the exit code."""
    code = _run(arguments)
    if arguments is None and _was_a_rank():
        _leave(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        from gradsieve.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB_MODULES:
            raise
        print(
            f"gradsieve: error: the command line needs {missing}, which is not installed: pip install 'gradsieve[lab]'",
            file=sys.stderr,
        )
        return 2


def _was_a_rank() -> bool:
    """Whether this process has joined the world of a launcher such as torchrun."""
    world = sys.modules.get("gradsieve.lab.train.world")
    return world is not None and bool(world.was_joined)


def _leave(code: int) -> None:
    """End the process without taking the interpreter apart.

    A thread of Gloo may still want the interpreter then. It cannot have it any more and aborts the process, whose work
    is done: seen once in some hundred runs.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed if the reader of a pipe has gone
            stream.flush()
    os._exit(code)
