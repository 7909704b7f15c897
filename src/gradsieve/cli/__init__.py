"""The `gradsieve` command. Heavy modules such as torch are imported only by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

LAB_MODULES = ("click", "rich", "matplotlib", "sklearn", "tokenizers", "PIL")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `gradsieve` command with `arguments`, or those of the process. Returns the exit code."""
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
