"""Converts the state of an engine to plain containers and back: tensors, numbers, texts, tuples, lists and dicts.

So `torch.save` writes it and `torch.load(weights_only=True)` reads it. Vectors with one value per entry of the gradient
(residual, velocity) are saved by parameter name. The states of a group (thresholds, regions) are saved by its names.

A rank's state has a key of its own, such as "rank 2 of 4". `torch.distributed.checkpoint` keeps one copy of values with
the same key on all ranks. The states of all ranks together are one dict with all residuals.
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
    """Return a copy of everything that an engine needs to continue bit for bit, under this rank's key."""
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
        "recipe": repr(engine.recipes[engine.number]),
        "steps_done": engine.steps_done,
        "loss_scale": engine.loss_scale,
        "dense_steps_left": engine.dense_steps_left,
        "decision": {} if engine.decision is None else engine.decision.state(),
        "names": tuple(engine.positions),
        "parameters": parameters,  # only those with a residual
        "groups": tuple(groups),  # `torch.distributed.checkpoint` saves a tuple as a whole; it drops empty dicts
    }


def unpack_into(engine: Engine, states: Mapping[str, Any], keep: Keep = "sum") -> None:
    """Continue from saved states: this rank's own, or those of all ranks of a run of another size.

    Nothing is changed unless the whole state fits.
    """
    own = states.get(key_of(engine.comm.rank, engine.comm.size))
    state = resharded(states, engine.comm.rank, engine.comm.size, keep) if own is None else own
    _check(engine, state)
    number = _number(engine, state)
    assert number is not None, "checked above"
    engine.use(number)
    saved_groups = {tuple(group["parameters"]): group for group in state["groups"]}
    restored = []
    for index, group in enumerate(engine.groups):
        for kind, vector in engine.vectors(index).items():
            for slot in group.slots:
                # A parameter that was sent whole has no residual.
                vector[slot.start : slot.stop] = state["parameters"].get(slot.name, {}).get(kind, 0.0)
        # Thresholds and regions of other groups do not fit: the next steps find new ones.
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
    if engine.decision is not None and state.get("decision"):
        engine.decision.load(state["decision"], same_ranks=own is not None)


def _check(engine: Engine, state: Mapping[str, Any]) -> None:
    rank = engine.comm.rank
    if state.get("format") != FORMAT:
        raise InputError(
            f"rank {rank}: not a state of this version: format must be {FORMAT}, got {state.get('format')}"
        )
    if _number(engine, state) is None:
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


def _number(engine: Engine, state: Mapping[str, Any]) -> int | None:
    """Return the number of the engine's recipe with which the state was saved; None if it has no such recipe."""
    saved = _parts(state["recipe"])
    return next((n for n, recipe in enumerate(engine.recipes) if _parts(repr(recipe)) == saved), None)


def _parts(recipe: str) -> str:
    """Return a recipe's text without the name of its class: earlier versions had a class per recipe."""
    return recipe.partition("(")[2]


def _check_vectors(rank: int, slot: Slot, saved: Mapping[str, Tensor], kinds: Collection[str]) -> None:
    if saved and not kinds:
        raise InputError(
            f"rank {rank}: parameter {slot.name} is kept dense in this run, but the state has a residual of it: "
            "load it with the rules that it was saved with"
        )
    numel = slot.stop - slot.start
    for kind, vector in saved.items():
        if vector.numel() != numel:
            raise InputError(
                f"rank {rank}: the {kind} of parameter {slot.name} must have {numel} entries, "
                f"the state has {vector.numel()}"
            )
