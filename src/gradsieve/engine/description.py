"""An engine as text: what is exchanged, by which recipe, in which groups."""

from __future__ import annotations

from collections.abc import Iterator

from gradsieve.engine.engine import Engine


def described(engine: Engine) -> Iterator[str]:
    """The lines that `print(sieve)` shows."""
    settings, comm = engine.settings, engine.comm
    sparse = [group for group in engine.groups if group.sparse]
    dense = [group for group in engine.groups if not group.sparse]
    yield f"Sieve(rank {comm.rank} of {comm.size}, step {engine.steps_done})"
    yield f"  recipe: {settings.recipe!r}"
    yield f"  density: {settings.schedule}" + (", dense for now" if engine.dense_steps_left else "")
    if engine.decision is not None:
        yield f"  decided: {engine.decision}"
    if engine.stats.buffer_bytes:
        yield f"  sent by DDP itself: {engine.stats.buffer_bytes:,} bytes of buffers at every forward pass"
    for title, groups in (("sent sparsely", sparse), ("kept dense", dense)):
        numel, count = sum(group.numel for group in groups), sum(len(group.slots) for group in groups)
        yield f"  {title}: {numel:,} entries of {count} parameters in {len(groups)} groups"
        for group in groups:
            own = "" if group.density is None else f", density {group.density:g}"
            yield f"    {group}{own}"
