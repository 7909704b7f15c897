"""Parameters are cut once into fixed groups. Each group is one flat vector, selected from and exchanged as a whole.

Buckets are DDP's and change after the first step. Groups are ours and never change. So residuals stay with their
parameters, and results do not depend on the order in which gradients arrive.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.engine.rules import Rules
from gradsieve.errors import InputError

BYTES_PER_MB = 1 << 20


class Slot(NamedTuple):
    """The range of a parameter in its group's vector."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype, device and density, end to end."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool  # False: always sent whole
    density: float | None = None  # None: the schedule's

    @property
    def numel(self) -> int:
        return self.slots[-1].stop

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, in their order in the vector."""
        return tuple(slot.name for slot in self.slots)

    def __str__(self) -> str:
        names = self.names[0] if len(self.slots) == 1 else f"{self.names[0]} ... {self.names[-1]}"
        kind = "sparse" if self.sparse else "dense"
        count = "1 parameter" if len(self.slots) == 1 else f"{len(self.slots)} parameters"
        return f"{kind}, {count} ({names}), {self.numel} entries, {str(self.dtype).removeprefix('torch.')}"


class _Key(NamedTuple):
    """The properties that all parameters of a group share."""

    sparse: bool
    dtype: torch.dtype
    device: torch.device
    density: float | None
    kind: Hashable


def cut_into_groups(
    parameters: Mapping[str, Tensor],
    rules: Rules,
    group_mb: float | None,
    kinds: Mapping[str, Hashable] | None = None,
) -> tuple[Group, ...]:
    """Return the groups in the order of their exchange: the order in which backward completes them, dense ones last.

    Backward runs from the end of a model, so parameters are taken in reverse. A sparse group is closed when the next
    parameter would make it larger than `group_mb`; None is one group for the whole model. All dense parameters of one
    dtype and device are one group. Parameters of different `kinds`, by name, never share a group.
    """
    if group_mb is not None and group_mb <= 0:
        raise InputError(f"group_mb must be positive, or None for one group, got {group_mb}")
    rules.check_names(parameters)
    room = math.inf if group_mb is None else group_mb * BYTES_PER_MB
    open_groups: dict[_Key, list[str]] = {}
    open_bytes: dict[_Key, int] = {}
    closed: list[tuple[_Key, list[str]]] = []
    for name in reversed(list(parameters)):
        key = _key(name, parameters[name], rules, None if kinds is None else kinds[name])
        num_bytes = parameters[name].numel() * parameters[name].element_size()
        if key.sparse and key in open_groups and open_bytes[key] + num_bytes > room:
            closed.append((key, open_groups.pop(key)))
            open_bytes[key] = 0
        open_groups.setdefault(key, []).append(name)
        open_bytes[key] = open_bytes.get(key, 0) + num_bytes
    closed += open_groups.items()
    positions = {name: position for position, name in enumerate(parameters)}
    closed.sort(key=lambda item: (not item[0].sparse, -positions[item[1][-1]]))
    return tuple(_group(key, members, parameters) for key, members in closed)


def _key(name: str, tensor: Tensor, rules: Rules, kind: Hashable) -> _Key:
    if not tensor.dtype.is_floating_point:
        raise InputError(f"parameter {name} must be floating point to be exchanged, got {tensor.dtype}")
    sparse = not rules.keeps_dense(name, tuple(tensor.shape))
    return _Key(sparse, tensor.dtype, tensor.device, rules.density_of(name) if sparse else None, kind)


def _group(key: _Key, members: list[str], parameters: Mapping[str, Tensor]) -> Group:
    slots, start = [], 0
    for name in members:
        stop = start + parameters[name].numel()
        slots.append(Slot(name, start, stop))
        start = stop
    return Group(tuple(slots), key.dtype, key.device, key.sparse, key.density)
