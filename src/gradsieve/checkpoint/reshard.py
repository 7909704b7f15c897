"""The states of all ranks of one run as those of a run of another size: nothing that is owed is lost.

Old rank r goes to new rank r mod size, so new ranks beyond the old ones owe nothing, and a new rank that takes over
several owes their sum. What is kept for each entry (residual, velocity) is linear in the gradients: the sum over ranks
stays what it was, now and in all steps to come. Thresholds and regions belong to ranks that are no more: the next
steps find new ones.

The mean over ranks divides by their number, and that changes. `keep="sum"`: a gradient that is owed counts as much as a
new one, as if it came from the new run; this fits a batch size a rank that stays. `keep="mean"`: what is owed moves the
parameters as far as it would have in the old run; this fits a batch size of all ranks together that stays.
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
    """What a rank's state is kept under."""
    return f"rank {rank} of {size}"


def resharded(states: Mapping[str, Any], rank: int, size: int, keep: Keep = "sum") -> dict[str, Any]:
    """What rank `rank` of a run of `size` ranks goes on from, given the states of all ranks of another run."""
    if keep not in get_args(Keep):
        raise InputError(f"rank {rank}: keep must be 'sum' or 'mean', got {keep!r}")
    everybody = _complete(states, rank, size)
    first = everybody[0]
    _check_alike(everybody, rank)
    weight = size / len(everybody) if keep == "mean" else 1.0
    taken = everybody[rank::size]
    # A rank that ended early may have been left with an older loss scale.
    factors = [weight * _scale(first) / _scale(state) for state in taken]
    parameters = {
        name: {kind: _merged([s["parameters"][name][kind] for s in taken], factors, v) for kind, v in kinds.items()}
        for name, kinds in first["parameters"].items()
    }
    return {**first, "parameters": parameters, "groups": ()}


def _complete(states: Mapping[str, Any], rank: int, size: int) -> list[Mapping[str, Any]]:
    """The states in rank order; all of one run must be there."""
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
            f"rank {rank}: the state must be {held}, or what others still owe is lost; it holds "
            f"{', '.join(map(repr, sorted(found)[:3]))}, and {', '.join(map(repr, missing[:3]))} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    return [states[key] for key in wanted]


def _check_alike(everybody: Sequence[Mapping[str, Any]], rank: int) -> None:
    for old, state in enumerate(everybody):
        for what in SAME_ON_ALL:
            if state.get(what) != everybody[0].get(what):
                raise InputError(
                    f"rank {rank}: the states are not of one moment of one run: {what} is {state.get(what)} on old "
                    f"rank {old}, {everybody[0].get(what)} on old rank 0"
                )
        if state["parameters"].keys() != everybody[0]["parameters"].keys():
            raise InputError(f"rank {rank}: old ranks 0 and {old} kept something for different parameters")


def _scale(state: Mapping[str, Any]) -> float:
    scale = state["loss_scale"]
    return 1.0 if scale is None else float(scale)


def _merged(vectors: Sequence[Tensor], factors: Sequence[float], like: Tensor) -> Tensor:
    """The sum, rounded once; a single vector as it is, and zeros for nobody's."""
    if len(vectors) == 1 and factors[0] == 1:
        return vectors[0]
    total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    for vector, factor in zip(vectors, factors, strict=True):
        total.add_(vector, alpha=factor)
    return total.to(like.dtype)
