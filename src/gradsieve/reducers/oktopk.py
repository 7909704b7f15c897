"""Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022).

Each rank owns one of P index regions, cut so that all regions get about the same number of entries.
1. At least every `repartition_every` steps the regions are cut anew, from where all ranks' entries lie now; sooner if
   an evaluation (3) has shown one owner to have far more sums than the mean.
2. Split and reduce: entries travel to the owner of their region, destinations rotated and a few under way at once; the
   owner adds them as they arrive.
3. At least every `threshold_every` steps the global threshold is evaluated, so that about k of all sums are not below
   it; in between it is reused. While the count leaves the band it is evaluated every step, else ever less often.
4. Balance and all-gather: owners keep what reaches the threshold. If the largest block exceeds `skew` times the mean,
   the blocks are first evened out; then all gather all blocks.
5. What a rank sent and does not find in the total, it keeps.

Cost: 2(P-1) messages and 2 calls in a step that reuses the threshold, 3(P-1) and 3 in one that evaluates it;
2k(P-1)/P to 6k(P-1)/P words a rank, about 4k(P-1)/P balanced.

Where this differs from the paper: regions (1) and threshold (3) come from gathered quantiles rather than from averaged
proposals and from gathering all sums: a few KB, right also when ranks differ much. A threshold that no longer fits is
not moved by a few percent but evaluated: with error feedback many sums wait just below it and come over it together.
Whether to balance (4) is decided by the sizes of the step before, which all ranks know; asking would cost a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from gradsieve.comm import Comm
from gradsieve.errors import InputError
from gradsieve.kernels import kernels
from gradsieve.reducers.protocol import Reduced, Reducer, equal_bounds
from gradsieve.reducers.quantiles import Spread, point_ranks
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel

MIN_POINTS = 32  # of a rank at an evaluation of the threshold
SAMPLED_SUMS = 1 << 14


class OkTopkState(NamedTuple):
    """The same on every rank."""

    bounds: tuple[int, ...]  # of the regions
    step: int = 0
    cut_at: int = 0  # the step at which the regions are cut next
    threshold: float = 0.0
    interval: int = 1  # steps from one evaluation of the threshold to the next
    evaluate_at: int = 0  # the step of the next one
    skewed: bool = False  # whether the blocks must be evened out next step


@dataclass(frozen=True)
class OkTopk(Reducer[OkTopkState]):
    """Split by balanced regions, reduce at the owners, gather what reaches a global threshold."""

    threshold_every: int = 32  # most steps between evaluations of the global threshold; 1 holds the count at k
    repartition_every: int = 64  # most steps between cuts of the regions; fewer follows moving gradients closer
    imbalance: float = 1.3  # largest region over mean region from which they are cut anew; lower cuts more often
    band: tuple[float, float] = (
        0.8,
        1.25,
    )  # counts (in k) that a reused threshold may give; wider evaluates less
    skew: float = 4.0  # largest block over mean block from which blocks are evened out; lower balances more often
    threshold_points: int = 512  # a rank's points at an evaluation, fewer for small k; more meets k closer
    points_per_region: int = 4  # a rank's points when regions are cut; more balances them closer

    def __post_init__(self) -> None:
        for name in ("threshold_every", "repartition_every", "threshold_points", "points_per_region"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.band[0] <= 1 <= self.band[1]:
            raise InputError(f"band must be positive and enclose 1, got {self.band}")
        if self.skew < 1 or self.imbalance < 1:
            raise InputError(f"skew and imbalance must be at least 1, got {self.skew} and {self.imbalance}")

    def start(self, numel: int, comm: Comm) -> OkTopkState:
        """See `Reducer.start`."""
        return OkTopkState(equal_bounds(numel, comm.size))

    def reduce(self, local: SparseVector, k: int, state: OkTopkState, comm: Comm) -> tuple[Reduced, OkTopkState]:
        """See `Reducer.reduce`."""
        if state.bounds[-1] != local.numel:
            raise InputError(f"rank {comm.rank}: the state is for numel {state.bounds[-1]}, got numel {local.numel}")
        channel = Channel(comm, local.numel, k)
        if state.step >= state.cut_at:  # 1
            bounds = self._balanced_bounds(local, comm)
            state = state._replace(bounds=bounds, cut_at=state.step + self.repartition_every)
        owned = add(part for _, part in channel.scatter(local.split(state.bounds), state.bounds))  # 2
        if state.step >= state.evaluate_at:  # 3
            state = self._evaluated(owned, k, state, comm)
        blocks, sizes = self._gathered(owned.above(state.threshold), state, channel)  # 4
        total = SparseVector.concatenate(blocks)
        leftover = local.without(total)  # 5
        return Reduced(total, leftover), self._next(state, k, sizes)

    def rescaled(self, state: OkTopkState, factor: float) -> OkTopkState:
        """See `Reducer.rescaled`."""
        return state._replace(threshold=state.threshold * factor)

    def _balanced_bounds(self, local: SparseVector, comm: Comm) -> tuple[int, ...]:
        """Regions that receive equal shares of all ranks' entries, as far as the gathered points tell."""
        ranks = point_ranks(local.nnz, self.points_per_region * comm.size)
        points = local.indices[ranks.to(local.indices.device)]
        spread = Spread(points, local.nnz, comm, descending=False)
        if spread.total == 0:
            return equal_bounds(local.numel, comm.size)
        inner = [int(spread.at(spread.total * part / comm.size)) + 1 for part in range(1, comm.size)]
        return (0, *inner, local.numel)

    def _evaluated(self, owned: SparseVector, k: int, state: OkTopkState, comm: Comm) -> OkTopkState:
        """With the magnitude that about k of all sums reach; zero if there are not more than k."""
        num_points = min(self.threshold_points, max(MIN_POINTS, k // (8 * comm.size)))
        # A sample serves as well: its error is a third of a percent of the count, its sort ten times faster.
        looked_at = kernels(owned.values).sample(owned.values, SAMPLED_SUMS)
        points = kernels(looked_at).descending_points(looked_at, point_ranks(looked_at.numel(), num_points))
        spread = Spread(points, owned.nnz, comm, descending=True)
        reusable = self._in_band(spread.count_before(state.threshold), k)
        interval = min(2 * state.interval, self.threshold_every) if reusable else 1
        uneven = max(spread.counts) * comm.size > self.imbalance * spread.total
        return state._replace(
            cut_at=state.step + 1 if uneven else state.cut_at,
            threshold=spread.at(k) if spread.total > k else 0.0,
            interval=interval,
            evaluate_at=state.step + interval,
        )

    def _gathered(
        self, block: SparseVector, state: OkTopkState, channel: Channel
    ) -> tuple[list[SparseVector], list[int]]:
        """The blocks that make up the total, and the sizes they had at their owners."""
        if state.skewed:
            sizes = _sizes(block, channel.comm)
            return channel.gather_blocks(_evened(block, sizes, channel)), sizes
        rank = channel.comm.rank
        blocks = channel.gather_blocks(block, state.bounds[rank], state.bounds[rank + 1])
        return blocks, [block.nnz for block in blocks]

    def _next(self, state: OkTopkState, k: int, sizes: Sequence[int]) -> OkTopkState:
        """What all ranks conclude for the next step from the sizes of the owners' blocks."""
        count, step = sum(sizes), state.step + 1
        fits = self._in_band(count, k) or (count < k and state.threshold == 0)
        return state._replace(
            step=step,
            evaluate_at=state.evaluate_at if fits else step,
            skewed=max(sizes) * len(sizes) > self.skew * count,
        )

    def _in_band(self, count: float, k: int) -> bool:
        return self.band[0] * k <= count <= self.band[1] * k


def _sizes(block: SparseVector, comm: Comm) -> list[int]:
    return [int(size) for size in comm.all_gather_v(torch.tensor([block.nnz], dtype=torch.int64))]


def _evened(block: SparseVector, sizes: Sequence[int], channel: Channel) -> SparseVector:
    """This rank's share after all blocks, laid end to end, are cut into equal ones."""
    rank, size = channel.comm.rank, channel.comm.size
    before = sum(sizes[:rank])
    cuts = [min(max(edge - before, 0), block.nnz) for edge in equal_bounds(sum(sizes), size)]
    parts = [SparseVector.trusted((block.indices[a:b], block.values[a:b]), block.numel) for a, b in pairwise(cuts)]
    arrived = [part for _, part in sorted(channel.scatter(parts), key=lambda item: item[0])]
    channel.check_order(arrived)
    return SparseVector.concatenate(arrived)
