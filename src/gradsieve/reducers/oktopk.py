"""Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022).

Each rank owns one of P index regions, cut so that all regions get about the same number of entries.
1. At least every `repartition_every` steps the regions are cut anew, from where all ranks' entries lie now; sooner if
   one owner has had far more sums than the mean.
2. Split and reduce: entries travel to the owner of their region, destinations rotated and a few under way at once; the
   owner adds them as they arrive.
3. Global threshold, the magnitude that about k of all sums reach: predicted in the step before, from that step's
   sums; or evaluated now, if there is no prediction or the last one was out of `band`.
4. Balance and all-gather: owners keep what reaches the threshold. If the largest block exceeds `skew` times the mean,
   the blocks are first evened out; then all gather all blocks, and with them some quantiles of all sums: from these
   every rank predicts the next threshold.
5. What a rank sent and does not find in the total, it keeps; and what was rounded away on the way to the total.

Cost: 2(P-1) messages and 2 calls in a step whose threshold was predicted, 3(P-1) and 3 in one that evaluates it;
2k(P-1)/P to 6k(P-1)/P words a rank, about 4k(P-1)/P balanced.

Where this differs from the paper: regions (1) and threshold (3) come from gathered quantiles rather than from averaged
proposals and from gathering all sums every 32 steps: about a KB, right also when ranks differ much. As they travel
with the blocks, the threshold is renewed at every step at no call. Moving it by a few percent instead does not hold k:
with error feedback many sums wait just below it and come over it together. They do so at every step while residuals
grow, so a prediction aims at k over how many times too many came so far. Whether to balance (4) is decided by the
sizes of the step before, which all ranks know; asking would cost a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.errors import InputError
from gradsieve.kernels import kernels
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import Reduced, Reducer, equal_bounds
from gradsieve.reducers.quantiles import Array, Spread, Summary, point_ranks
from gradsieve.vector import SparseVector, Sum, add
from gradsieve.wire import Channel

MIN_POINTS = 32  # of a rank's sums
SAMPLED_SUMS = 1 << 12
LEAST_STEPS_BETWEEN_CUTS = 4  # a cut costs a call, and cannot even out what lies on one index


class OkTopkState(NamedTuple):
    """The same on every rank."""

    bounds: tuple[int, ...]  # of the regions
    step: int = 0
    cut_at: int = 0  # the step at which the regions are cut next
    k: int = 0  # that the threshold is for
    threshold: float = 0.0  # as predicted
    growth: float = 1.0  # how many times more sums reach a threshold than did a step before
    evaluate: bool = True  # whether the prediction is not to be trusted
    skewed: bool = False  # whether the blocks must be evened out next step


@dataclass(frozen=True)
class OkTopk(Reducer[OkTopkState]):
    """Split by balanced regions, reduce at the owners, gather what reaches a global threshold."""

    repartition_every: int = 64  # most steps between cuts of the regions; fewer follows moving gradients closer
    imbalance: float = 1.15  # largest region over mean region from which they are cut anew; lower cuts more often
    band: tuple[float, float] = (0.8, 1.25)  # counts (in k) that a prediction may give; narrower evaluates more often
    skew: float = 4.0  # largest block over mean block from which blocks are evened out; lower balances more often
    threshold_points: int = 128  # a rank's points for the threshold, fewer for small k; more meets k closer
    points_per_region: int = 8  # a rank's points when regions are cut; more balances them closer

    def __post_init__(self) -> None:
        for name in ("repartition_every", "threshold_points", "points_per_region"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.band[0] <= 1 <= self.band[1]:
            raise InputError(f"band must be positive and enclose 1, got {self.band}")
        if self.skew < 1 or self.imbalance < 1:
            raise InputError(f"skew and imbalance must be at least 1, got {self.skew} and {self.imbalance}")

    @override
    def start(self, numel: int, comm: Comm) -> OkTopkState:
        return OkTopkState(equal_bounds((0, numel), comm.size))

    @override
    def reduce(self, local: SparseVector, k: int, state: OkTopkState, comm: Comm) -> tuple[Reduced, OkTopkState]:
        if state.bounds[-1] != local.numel:
            raise InputError(f"rank {comm.rank}: the state is for numel {state.bounds[-1]}, got numel {local.numel}")
        channel = Channel(comm, local, k, self.codec)
        if state.step >= state.cut_at:  # 1
            bounds = self._balanced_bounds(local, channel)
            state = state._replace(bounds=bounds, cut_at=state.step + self.repartition_every)
        scattered = channel.scatter(local, local.split(state.bounds), state.bounds)  # 2
        owned = add(part for _, part in scattered.arriving)
        summary = self._summary(owned, k, comm.size)
        threshold, predicted = state.threshold, None
        if state.evaluate or k != state.k:  # 3
            spread = _spread(comm.rank, [part.numpy() for part in channel.gather_numbers(torch.from_numpy(summary))])
            threshold, predicted = _threshold(spread, k), spread.count_before(state.threshold)
        blocks, summaries, sizes = self._gathered(owned.above(threshold), summary, state, channel)  # 4
        total = SparseVector.concatenate(blocks)
        kept = scattered.rounding.undelivered(total)  # 5
        reached = sum(sizes) if predicted is None else predicted
        spread = _spread(comm.rank, summaries)
        return Reduced(total, Sum([kept, channel.leftover()])), self._next(state, k, spread, sizes, reached)

    @override
    def rescaled(self, state: OkTopkState, factor: float) -> OkTopkState:
        return state._replace(threshold=state.threshold * factor)

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """A balanced share of every rank's entries, then about k sums.

        6k(P-1)/P bounds the words while regions and threshold fit. The limit also holds when the gradient has just
        changed altogether: then one region may get all entries, and all sums may reach the threshold, at the owners
        and balanced.
        """
        share = (size - 1) / size
        sums = min(2 * k * size, numel)
        regions, threshold = 2 + 2 * self.points_per_region * size, 2 * (2 + self.threshold_points)
        return Cost(
            6 * (size - 1),
            4 * k * share,
            min(2 * k, numel) * (size - 1) + 2 * sums,
            (size - 1) * (regions + threshold + 2),
        )

    def _balanced_bounds(self, local: SparseVector, channel: Channel) -> tuple[int, ...]:
        """Regions that receive equal shares of all ranks' entries, as far as the gathered points tell."""
        comm = channel.comm
        ranks = torch.from_numpy(point_ranks(local.nnz, self.points_per_region * comm.size))
        points = local.indices[ranks.to(local.indices.device)].cpu().long()
        gathered = [part.tolist() for part in channel.gather_numbers(torch.cat([torch.tensor([local.nnz]), points]))]
        parts = [Summary(part[0] if part else -1, np.array(part[1:], np.int64)) for part in gathered]
        spread = Spread(comm.rank, parts, (0, local.numel - 1), descending=False)
        if spread.total == 0:
            return equal_bounds((0, local.numel), comm.size)
        inner = [int(spread.at(spread.total * part / comm.size)) + 1 for part in range(1, comm.size)]
        return (0, *inner, local.numel)

    def _summary(self, owned: SparseVector, k: int, size: int) -> Array:
        """How many sums this rank has, and some of their magnitudes, evenly spaced by rank."""
        num_points = min(self.threshold_points, max(MIN_POINTS, k // (32 * size)))
        # A sample serves as well: its error is about a percent of the count, its sort ten times faster.
        looked_at = kernels(owned.values).sample(owned.values, SAMPLED_SUMS)
        ranks = torch.from_numpy(point_ranks(looked_at.numel(), num_points))
        points = kernels(looked_at).descending_points(looked_at, ranks)
        return Summary(owned.nnz, points.cpu().numpy()).note()

    def _gathered(
        self, block: SparseVector, summary: Array, state: OkTopkState, channel: Channel
    ) -> tuple[list[SparseVector], list[Array], list[int]]:
        """The blocks that make up the total, the ranks' summaries, and the sizes that blocks had at their owners."""
        if state.skewed:
            sizes = [int(size) for size in channel.gather_numbers(torch.tensor([block.nnz]))]
            return *channel.gather_blocks(_evened(block, sizes, channel), note=summary), sizes
        blocks, summaries = channel.gather_blocks(block, state.bounds[channel.comm.rank], summary)
        return blocks, summaries, [block.nnz for block in blocks]

    def _next(self, state: OkTopkState, k: int, spread: Spread, sizes: list[int], reached: float) -> OkTopkState:
        """What all ranks conclude for the next step; `reached`: how many sums the predicted threshold lets through."""
        step = state.step + 1
        rested = step >= state.cut_at - self.repartition_every + LEAST_STEPS_BETWEEN_CUTS
        uneven = rested and max(spread.counts) * len(sizes) > self.imbalance * spread.total
        fits = self.band[0] * k <= reached <= self.band[1] * k or (reached < k and state.threshold == 0)
        growth = (state.growth + min(max(reached * state.growth / k, 0.5), 4.0)) / 2 if k == state.k else 1.0
        return state._replace(
            step=step,
            cut_at=step if uneven else state.cut_at,
            k=k,
            threshold=_threshold(spread, k / growth),
            growth=growth,
            evaluate=not fits,
            skewed=max(sizes) * len(sizes) > self.skew * sum(sizes),
        )


def _spread(rank: int, notes: Sequence[Array]) -> Spread:
    return Spread(rank, [Summary.read(note) for note in notes], (0.0, np.inf), descending=True)


def _threshold(spread: Spread, count: float) -> float:
    """The magnitude that about so many of all sums reach; zero if there are not more."""
    return float(spread.at(count)) if spread.total > count else 0.0


def _evened(block: SparseVector, sizes: Sequence[int], channel: Channel) -> SparseVector:
    """This rank's share after all blocks, laid end to end, are cut into equal ones."""
    rank, size = channel.comm.rank, channel.comm.size
    before = sum(sizes[:rank])
    cuts = [min(max(edge - before, 0), block.nnz) for edge in equal_bounds((0, sum(sizes)), size)]
    parts = [SparseVector.trusted((block.indices[a:b], block.values[a:b]), block.numel) for a, b in pairwise(cuts)]
    scattered = channel.scatter(block, parts)
    arrived = [part for _, part in sorted(scattered.arriving, key=lambda item: item[0])]
    channel.check_order(arrived)
    channel.keep(scattered.rounding.error)
    return SparseVector.concatenate(arrived)
