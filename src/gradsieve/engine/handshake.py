"""Checks that all ranks have the same settings, before the first exchange. Found later, a difference is a riddle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from gradsieve.comm import Comm
from gradsieve.engine.engine import Settings
from gradsieve.engine.groups import Group
from gradsieve.engine.rules import Rules
from gradsieve.errors import MismatchError
from gradsieve.version import __version__


def facts(groups: Sequence[Group], settings: Settings, rules: Rules) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, by the names that users know."""
    names = [name for group in groups for name in group.names]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    sizes = ", ".join(f"{group.numel} {str(group.dtype).removeprefix('torch.')}" for group in groups)
    return {
        "gradsieve version": __version__,
        "recipe": repr(settings.recipe),
        "other recipes to choose from": repr(settings.others),
        "density": str(settings.schedule),
        "local_clip_norm": repr(settings.local_clip_norm),
        "check_replicas_every": repr(settings.check_replicas_every),
        "withholding of unused parameters": repr(settings.withhold_unused),
        "rules": repr(rules),
        "number of parameters": str(len(names)),
        "number of groups": str(len(groups)),
        "entries of the groups": sizes,
        "parameter names and their order (digest)": digest,
    }


def compare(mine: Mapping[str, str], comm: Comm) -> None:
    """Raise on every rank, naming ranks and settings, unless all ranks have the same facts."""
    message = torch.frombuffer(bytearray(json.dumps(dict(mine)).encode()), dtype=torch.uint8)
    gathered = [json.loads(bytes(part.tolist())) for part in comm.all_gather_v(message)]
    keys = {key: None for theirs in gathered for key in theirs}
    differences = [
        difference for key in keys if (difference := _difference(key, [theirs.get(key) for theirs in gathered]))
    ]
    if differences:
        raise MismatchError(f"rank {comm.rank}: ranks must be set up alike, but {'; '.join(differences)}")


def _difference(key: str, values: Sequence[str | None]) -> str | None:
    """List the ranks by value, the rarest value first: it is likely the wrong one."""
    holders: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    if len(holders) == 1:
        return None
    (odd, first), *others = sorted(holders.items(), key=lambda item: len(item[1]))
    return ", ".join([f"{_ranks(first)} {key} {odd}", *(f"{_ranks(ranks)} {value}" for value, ranks in others)])


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"
