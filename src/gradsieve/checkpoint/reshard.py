"""Converts the states of all ranks of one run to a run of another size, without losing any residual.

Old rank r goes to new rank r mod size. So a new rank that takes over several old ones has the sum of their residuals,
and new ranks beyond the old ones have residuals of zero. The vectors of a state (residual, velocity) are linear in the
gradients, so their sums over ranks stay the same, now and in all later steps. Thresholds and regions depend on the
ranks: the next steps find new ones.

The mean over ranks divides by their number, which changes. With `keep="sum"` a gradient in the residual counts as much
as a new one, as if it came from the new run. Use it if the batch size per rank stays the same. With `keep="mean"` the
residual moves the parameters as far as it would have in the old run. Use it if the batch size of all ranks together
stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gradsieve.errors import InputError

Keep = Literal["sum", "mean"]
SAME_ON_ALL = ("format", "recipe", "names", "steps_done", "dense_steps_left")


def key_of(rank: int, size: int) -> str:
    """Return the key of a rank's state."""
    return f"rank {rank} of {size}"


def resharded(states: Mapping[str, Any], rank: int, size: int, keep: Keep = "sum") -> dict[str, Any]:
    """Return the state of rank `rank` in a run of `size` ranks, from the states of all ranks of another run."""
    if keep not in get_args(Keep):
        raise InputError(f"rank {rank}: keep must be 'sum' or 'mean', got {keep!r}")
    ordered = _complete(states, rank, size)
    first = ordered[0]
    _check_alike(ordered, rank)
    weight = size / len(ordered) if keep == "mean" else 1.0
    taken = ordered[rank::size]
    # A rank whose inputs ended early may have an older loss scale.
    factors = [weight * _scale(first) / _scale(state) for state in taken]
    parameters = {
        name: {kind: _merged([s["parameters"][name][kind] for s in taken], factors, v) for kind, v in kinds.items()}
        for name, kinds in first["parameters"].items()
    }
    return {**first, "parameters": parameters, "groups": ()}


def _complete(states: Mapping[str, Any], rank: int, size: int) -> list[Mapping[str, Any]]:
    """Return the states in rank order; raise unless they are those of all ranks of one run."""
    found = {key: match for key in states if (match := re.fullmatch(r"rank (\d+) of (\d+)", str(key)))}
    sizes = sorted({int(match[2]) for match in found.values()})
    if len(sizes) != 1:
        held = ", ".join(map(repr, list(states)[:3])) or "nothing"
        raise InputError(
            f"rank {rank}: the state must be this rank's ({key_of(rank, size)!r}), or those of all ranks of one run; "
            f"it holds {held}"
        )
    wanted = [key_of(old, sizes[0]) for old in range(sizes[0])]
    missing = [key for key in wanted if key not in states]
    if missing:
        held = f"this rank's own ({key_of(rank, size)!r})" if sizes[0] == size else f"those of all {sizes[0]} ranks"
        raise InputError(
            f"rank {rank}: the state must be {held}, or the residuals of other ranks are lost; it holds "
            f"{', '.join(map(repr, sorted(found)[:3]))}, and {', '.join(map(repr, missing[:3]))} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    return [states[key] for key in wanted]


def _check_alike(ordered: Sequence[Mapping[str, Any]], rank: int) -> None:
    for old, state in enumerate(ordered):
        for what in SAME_ON_ALL:
            if state.get(what) != ordered[0].get(what):
                raise InputError(
                    f"rank {rank}: the states were not saved at the same step of one run: {what} is {state.get(what)} "
                    f"on old rank {old}, {ordered[0].get(what)} on old rank 0"
                )
        if state["parameters"].keys() != ordered[0]["parameters"].keys():
            raise InputError(f"rank {rank}: old ranks 0 and {old} have residuals of different parameters")


def _scale(state: Mapping[str, Any]) -> float:
    scale = state["loss_scale"]
    return 1.0 if scale is None else float(scale)


def _merged(vectors: Sequence[Tensor], factors: Sequence[float], like: Tensor) -> Tensor:
    """Return the weighted sum, rounded once: a single vector unchanged, and zeros for no vector."""
    if len(vectors) == 1 and factors[0] == 1:
        return vectors[0]
    total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    for vector, factor in zip(vectors, factors, strict=True):
        total.add_(vector, alpha=factor)
    return total.to(like.dtype)
