"""The `gradsieve` command and its subcommands. An error meant for the user is printed as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from gradsieve.cli.bench import bench
from gradsieve.cli.compare import compare
from gradsieve.cli.data import data
from gradsieve.cli.demo import demo
from gradsieve.cli.lab import lab
from gradsieve.cli.lab_space import Invocation
from gradsieve.cli.listing import listing
from gradsieve.cli.train import train
from gradsieve.cli.tune import tune
from gradsieve.errors import GradsieveError
from gradsieve.version import __version__

USAGE_ERROR = 2
INTERRUPTED = 130
# click 8.2 and later raise this if no command is given; click 8.1 prints the help and exits.
HELP_WANTED = getattr(click.exceptions, "NoArgsIsHelpError", ())


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: gradsieve demo",
)
@click.version_option(__version__, prog_name="gradsieve")
def app() -> None:
    """Sparse all-reduce for PyTorch data-parallel training over slow networks."""


for command in (listing, bench, demo, tune, train, compare, lab, data):
    app.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run with these arguments, or those of the process. Returns the exit code."""
    invocation = Invocation(owns_process=arguments is None)
    try:
        outcome = app.main(arguments, prog_name="gradsieve", standalone_mode=False, obj=invocation)
    except HELP_WANTED as error:
        click.echo(error.format_message(), err=True)
        return USAGE_ERROR
    except click.UsageError as error:
        return _failed(f"{_one_line(error.format_message())} {_where_help_is(error)}", USAGE_ERROR)
    except click.ClickException as error:
        return _failed(_one_line(error.format_message()), USAGE_ERROR)
    except GradsieveError as error:
        return _failed(_one_line(str(error)), USAGE_ERROR)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _pipe_closed()
    return outcome if isinstance(outcome, int) else 0


def _failed(sentence: str, code: int) -> int:
    click.echo(f"gradsieve: error: {sentence}", err=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _where_help_is(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "gradsieve"
    return f"(see {command} --help)"


def _pipe_closed() -> int:
    """As in `gradsieve list | head -1`. Without this the interpreter fails to flush stdout at exit."""
    sys.stdout = None
    return 1
