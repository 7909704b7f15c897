"""Tables of a comparison: the live one while it runs, and the summary over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]


def summary_table(content: Row) -> Table:
    """Mean and standard deviation over seeds, one row per recipe, from the content of summary.json."""
    from rich import box
    from rich.table import Table

    shown = Table(title=title(content), title_justify="left", box=box.SIMPLE_HEAD)
    metrics = content["settings"]["metrics"]
    shown.add_column("recipe", no_wrap=True, style="bold")
    scores = [f"{evaluated_part(content)} {name.replace('_', ' ')}" for name in metrics]
    for heading in (*scores, "train loss", "step time", "exchange time", "MB per step"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in content["summary"].items():
        cells = [_spread(row["scores"].get(metric), "{:.4f}") for metric in metrics]
        cells += [_spread(row["train_loss"], "{:.4f}"), _spread(row["step_seconds"], "{:.1f} ms", 1e3)]
        cells += [_spread(row["exchange_seconds"], "{:.1f} ms", 1e3)]
        cells += [_spread(row["bytes_received_per_step"], "{:.4g}", 1e-6)]
        shown.add_row(name + (f" ({row['diverged']} diverged)" if row["diverged"] else ""), *cells)
    return shown


def live_table(rows: dict[tuple[str, int], Row]) -> Table:
    """The latest step of every run, by label and seed."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("recipe", "seed", "step", "loss", "test", "step time", "MB per step"):
        shown.add_column(heading, justify="left" if heading in ("recipe", "test") else "right", no_wrap=True)
    for (label, seed), row in rows.items():
        loss = time = traffic = ""
        if "loss" in row:
            loss, time = f"{row['loss']:.3f}", f"{row['step_seconds'] * 1e3:.0f} ms"
            traffic = f"{row['step_bytes'] / 1e6:.3g}"
        steps = f"{row['step']}/{row['total_steps']}"
        shown.add_row(label, str(seed), steps, loss, row.get("scores", ""), time, traffic)
    return shown


def title(content: Row) -> str:
    settings, seeds = content["settings"], len(next(iter(content["summary"].values()))["seeds"])
    density = settings["exchange"]["density"]
    return (
        f"{settings['workload']}, {settings['parameters']:,} parameters, {settings['workers']} ranks, "
        f"{settings['total_steps']:,} steps, {seeds} seed{'s' if seeds > 1 else ''}, "
        f"density {density if density is not None else 'of the preset'}"
    )


def evaluated_part(content: Row) -> str:
    """The part of the data that was evaluated: test or validation. Summaries of older versions do not name it."""
    part: str = content["settings"].get("evaluate", "test")
    return part


def _spread(value: Row | None, form: str, scale: float = 1.0) -> str:
    if value is None or value["mean"] is None:
        return "-"
    text = form.format(value["mean"] * scale)
    return text if len(value["values"]) < 2 else f"{text} ± {value['deviation'] * scale:.2g}"
