"""Checks that all ranks still have the same parameters, bit for bit. If not, training goes on and is worth nothing.

Each parameter has a 64-bit fingerprint: the sum of its words, each times an odd number that depends on its position.
One word that differs always changes the fingerprint. Several do except with a probability of one in billions. All ranks
see all fingerprints, so they come to the same verdict. It names the ranks that differ from the majority.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.errors import ReplicaError
from gradsieve.wire.channel import phase

CHUNK_WORDS = 1 << 15  # words per pass: their products stay in the cache
FOLD = 0x2545F4914F6CDD1D  # multiplies the sum of the chunks so far; odd, so that no bit is lost
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprints(parameters: Sequence[Tensor]) -> Tensor:
    """Return one number per parameter, in main memory."""
    factors = _factors()
    by_device = {device: factors.to(device) for device in {parameter.device for parameter in parameters}}
    return torch.stack([_fingerprint(parameter, by_device[parameter.device]).cpu() for parameter in parameters])


def compare_replicas(parameters: Mapping[str, Tensor], comm: Comm, *, joined: bool = False) -> None:
    """Raise on every rank unless all have the same parameters. All ranks call it together.

    `joined`: this rank's inputs have ended. It no longer updates its parameters, and is left out of the comparison.
    """
    own = torch.empty(0, dtype=torch.int64) if joined else fingerprints(list(parameters.values()))
    with phase("comparison of replicas"):
        gathered = [part.tolist() for part in comm.all_gather_v(own)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, prints in enumerate(gathered):
        if prints:
            holders.setdefault(tuple(prints), []).append(rank)
    if len(holders) > 1:
        raise _drifted(holders, list(parameters), comm.rank)


def _drifted(holders: Mapping[tuple[int, ...], list[int]], names: Sequence[str], rank: int) -> ReplicaError:
    camps = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    (most, many), (_, runners_up) = camps[:2]
    decided = len(many) > len(runners_up)
    odd = sorted(r for _, ranks in camps[1 if decided else 0 :] for r in ranks)
    differing = [i for i in range(len(names)) if any(prints[i] != most[i] for prints, _ in camps[1:])]
    first = names[differing[0]]
    against = f"from {_listed(many)}" if decided else "from each other, and no state has a majority"
    return ReplicaError(
        f"rank {rank}: replicas have drifted apart: {_listed(odd)} differ{'s' if len(odd) == 1 else ''} {against}; "
        f"parameter {first} is the first of {len(differing)} that are not the same (of {len(names)}). Find out what "
        "changes them on some ranks only, and start again from a checkpoint; check_replicas_every=0 never compares",
        ranks=tuple(odd),
        parameter=first,
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _fingerprint(parameter: Tensor, factors: Tensor) -> Tensor:
    # In the order of the shape: the order in memory may differ from rank to rank.
    flat = parameter.detach().reshape(-1)
    words = flat.view(WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in torch.split(words, CHUNK_WORDS):
        total = total * FOLD + (factors[: chunk.numel()] * chunk).sum()
    return total


def _factors() -> Tensor:
    """Return odd pseudorandom numbers: the positions 1, 2, ... mixed as in SplitMix64."""
    mixed = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))
