"""What an engine remembers as plain containers and back: tensors, numbers, texts, tuples, lists and dicts only.

So `torch.save` writes it and `torch.load(weights_only=True)` reads it. What belongs to an entry of the gradient
(residual, velocity) is kept by parameter name; what belongs to a group (thresholds, regions) by the group's names.

A rank's state lies under a key of its own, "rank 2 of 4": `torch.distributed.checkpoint` keeps one copy of what has the
same name on all ranks, and the ranks' files together are one dict of all that was owed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from gradsieve.checkpoint.reshard import Keep, key_of, resharded
from gradsieve.engine import Engine
from gradsieve.engine.groups import Slot
from gradsieve.errors import InputError
from gradsieve.pipeline import PipelineState

FORMAT = 1


def packed(engine: Engine) -> dict[str, Any]:
    """A copy of all an engine must know to go on exactly as it would have, under this rank's key."""
    return {key_of(engine.comm.rank, engine.comm.size): _own(engine)}


def _own(engine: Engine) -> dict[str, Any]:
    parameters: dict[str, dict[str, Tensor]] = {}
    groups = []
    for index, group in enumerate(engine.groups):
        vectors = engine.vectors(index)
        for slot in group.slots if vectors else ():
            parameters[slot.name] = {kind: v[slot.start : slot.stop].clone() for kind, v in vectors.items()}
        state = engine.states[index]
        groups.append(
            {
                "parameters": list(group.names),
                "selector": state.selector._asdict(),
                "reducer": state.reducer._asdict(),
            }
        )
    return {
        "format": FORMAT,
        "recipe": repr(engine.settings.recipe),
        "steps_done": engine.steps_done,
        "loss_scale": engine.loss_scale,
        "dense_steps_left": engine.dense_steps_left,
        "names": tuple(engine.positions),
        "parameters": parameters,  # those that something is kept for
        "groups": tuple(groups),  # a tuple is one thing to `torch.distributed.checkpoint`, which drops empty dicts
    }


def unpack_into(engine: Engine, states: Mapping[str, Any], keep: Keep = "sum") -> None:
    """Go on from saved states: this rank's own, or those of all ranks of a run of another size.

    Nothing is changed unless all of it fits.
    """
    own = states.get(key_of(engine.comm.rank, engine.comm.size))
    state = resharded(states, engine.comm.rank, engine.comm.size, keep) if own is None else own
    _check(engine, state)
    saved_groups = {tuple(group["parameters"]): group for group in state["groups"]}
    restored = []
    for index, group in enumerate(engine.groups):
        for kind, vector in engine.vectors(index).items():
            for slot in group.slots:
                # Nothing is owed to a parameter that was kept dense.
                vector[slot.start : slot.stop] = state["parameters"].get(slot.name, {}).get(kind, 0.0)
        # Thresholds and regions of groups that were cut otherwise do not fit: the next steps find new ones.
        saved = saved_groups.get(group.names)
        fresh = engine.fresh_state(index)
        if saved is not None:
            fresh = PipelineState(
                fresh.feedback,
                fresh.selector._replace(**saved["selector"]),
                fresh.reducer._replace(**saved["reducer"]),
            )
        restored.append(fresh)
    engine.restore(restored, state["steps_done"], state["loss_scale"], state["dense_steps_left"])


def _check(engine: Engine, state: Mapping[str, Any]) -> None:
    rank = engine.comm.rank
    if state.get("format") != FORMAT:
        raise InputError(
            f"rank {rank}: not a state of this version: format must be {FORMAT}, got {state.get('format')}"
        )
    if _parts(state["recipe"]) != _parts(repr(engine.settings.recipe)):
        raise InputError(
            f"rank {rank}: the state was saved with recipe {state['recipe']}, this run has {engine.settings.recipe!r}"
        )
    saved, names = state["parameters"], set(state["names"])
    if names != set(engine.positions):
        missing, extra = sorted(set(engine.positions) - names), sorted(names - set(engine.positions))
        raise InputError(
            f"rank {rank}: the state belongs to another model: parameters missing in it {missing[:3]}, "
            f"unknown in this model {extra[:3]}"
        )
    for index, group in enumerate(engine.groups):
        kinds = engine.vectors(index)
        for slot in group.slots:
            _check_vectors(rank, slot, saved.get(slot.name, {}), kinds)


def _parts(recipe: str) -> str:
    """A recipe's text without the name of its class, which each recipe had once."""
    return recipe.partition("(")[2]


def _check_vectors(rank: int, slot: Slot, saved: Mapping[str, Tensor], kinds: Collection[str]) -> None:
    if saved and not kinds:
        raise InputError(
            f"rank {rank}: parameter {slot.name} is kept dense in this run, but the state says it is still owed "
            "something: load it with the rules it was saved with"
        )
    numel = slot.stop - slot.start
    for kind, vector in saved.items():
        if vector.numel() != numel:
            raise InputError(
                f"rank {rank}: the {kind} of parameter {slot.name} must have {numel} entries, "
                f"the state has {vector.numel()}"
            )
