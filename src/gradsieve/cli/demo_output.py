"""What `gradsieve demo` says at the end: a table, one sentence with the numbers, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
PAGES = "https://github.com/gradsieve/gradsieve/tree/main/docs"
NEXT = f"""\
Next, in your own script (DistributedDataParallel under torchrun):

    +import gradsieve
     model = DistributedDataParallel(model)
     optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    +sieve = gradsieve.attach(model, optimizer=optimizer)

That exchanges one-bit updates, or dense gradients where these are faster.
Ok-Topk, for SGD without momentum, is gradsieve.attach(model, "oktopk", density=0.03).
Your script on links like these: gradsieve lab run --hosts 4 --rate 100mbit -- python train.py
Read on: {PAGES}/optimizers.md, ddp.md, frontends.md (Lightning, Accelerate, Trainer), network-lab.md."""


def next_steps() -> str:
    """The lines to change in a script of one's own, and where to read on."""
    return NEXT


def table(content: Row) -> Table:
    """One row per contestant, from the content of demo.json. Computed times are in columns that say so."""
    from rich import box
    from rich.table import Table

    demo = content["demo"]
    shown = Table(title=_title(content), title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("contestant", no_wrap=True, style="bold")
    for heading in _headings(demo):
        shown.add_column(heading, justify="right")
    for row in content["results"]:
        measured = [] if demo["is_measured"] else [f"{row['loopback_seconds_per_step']:.3f}"]
        shown.add_row(
            row["name"] + (" (diverged)" if row["diverged"] else ""),
            "-" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
            *measured,
            f"{row['seconds_per_step']:.3f}",
            f"{row['seconds']:.1f}",
            f"{row['bytes_received'] / 1e6:.3g}",
            f"{row['times_sooner']:.1f}x",
        )
    return shown


def _headings(demo: Row) -> tuple[str, ...]:
    rest = "MB received per rank", "sooner than dense"
    if demo["is_measured"]:
        return "test accuracy", "s per step", "s in all", *rest
    at = f"at {demo['rate']} (computed)"
    seconds = "s per step, loopback", f"s per step {at}", f"s in all {at}"
    return "test accuracy", *seconds, rest[0], f"{rest[1]} (computed)"


def _title(content: Row) -> str:
    demo, model = content["demo"], content["model"]
    where = f"links of {demo['rate']}" if demo["is_measured"] else "loopback"
    return (
        f"{demo['hosts']} hosts on {where}, {model['parameters']:,} parameters, {demo['steps']} steps of "
        f"{demo['hosts'] * model['batch']} digits, seed {demo['seed']}"
    )


def summary(content: Row) -> str:
    """One sentence: one-bit updates, the default, beside dense. Its numbers are measured, or it says how computed."""
    demo, (dense, *_, ours) = content["demo"], content["results"]
    said = (
        f"{ours['name']} took {ours['seconds']:.1f} s for {ours['steps']} steps, dense DDP {dense['seconds']:.1f} s "
        f"({ours['times_sooner']:.1f} times as long), with {ours['times_fewer_bytes']:.0f} times fewer bytes; "
        f"{_accuracy(ours)} of the test digits are correct, with dense DDP {_accuracy(dense)}"
    )
    if demo["is_measured"]:
        return f"Measured just now on links of {demo['rate']}: {said} (one seed)."
    return (
        f"Computed for links of {demo['rate']}, not measured: from seconds per step over loopback and bytes, "
        f"{said.replace(' took ', ' would take ', 1)} (one seed). There was no network: {demo['obstacle']}."
    )


def _accuracy(row: Row) -> str:
    return "none" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
