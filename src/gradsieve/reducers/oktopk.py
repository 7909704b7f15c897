"""Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
https://arxiv.org/abs/2201.07598).

Each rank owns one of P index regions. Regions are cut so that all receive about the same number of entries.
1. At least every `repartition_every` steps the regions are cut again, from the present indices of all ranks' entries.
   They are cut sooner if one owner has had many more sums than the mean.
2. Split and reduce: each rank sends its entries to the owners of their regions. Destinations are rotated, with a few
   messages in flight. The owner adds entries as they arrive.
3. Global threshold: the magnitude that about k of all sums reach. It is predicted in the previous step from that step's
   sums. It is evaluated in this step if there is no prediction or the last one was outside `band`.
4. Balance and all-gather: owners keep the sums that reach the threshold. If the largest block exceeds `skew` times the
   mean, the blocks are first evened out. Then all ranks gather all blocks, with some quantiles of all sums. From these
   every rank predicts the next threshold.
5. A rank keeps the entries that it sent and that are not in the total, and the rounding errors of the delivered ones.

Cost: 2(P-1) messages and 2 calls in a step with a predicted threshold, 3(P-1) and 3 in a step that evaluates it.
2k(P-1)/P to 6k(P-1)/P words per rank, about 4k(P-1)/P if balanced.

Where this differs from the paper:
- Regions (1) and threshold (3) come from gathered quantiles, about a KB. The paper averages the ranks' proposals, and
  gathers all sums every 32 steps. Quantiles are right even if ranks differ much.
- Quantiles are sent with the blocks, so the threshold is renewed at every step without another call. Moving it by a few
  percent instead does not keep the count near k: with error feedback many sums are just below the threshold and reach
  it together. They do so at every step while residuals grow. So a prediction aims at k divided by the factor by which
  counts have been too large.
- Whether to balance (4) is decided by the sizes of the previous step, which all ranks know. Asking would cost a call.
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

MIN_POINTS = 32  # quantiles of a rank's sums, at least
SAMPLED_SUMS = 1 << 12  # sums from which quantiles are taken; more is more accurate, and slower to sort
LEAST_STEPS_BETWEEN_CUTS = 4  # a cut costs a call, and cannot split entries at one index


class OkTopkState(NamedTuple):
    """The same on every rank."""

    bounds: tuple[int, ...]  # of the regions
    step: int = 0
    cut_at: int = 0  # the step at which the regions are cut next
    k: int = 0  # the k for which the threshold was predicted
    threshold: float = 0.0  # the prediction
    growth: float = 1.0  # sums that reach a threshold, over those of the previous step
    evaluate: bool = True  # whether the next step must evaluate the threshold
    skewed: bool = False  # whether the next step must even out the blocks


@dataclass(frozen=True)
class OkTopk(Reducer[OkTopkState]):
    """Split by balanced regions, sum at the owners, gather the sums that reach a global threshold."""

    repartition_every: int = 64  # most steps between cuts of the regions; fewer follows moving gradients more closely
    imbalance: float = 1.15  # largest over mean region from which regions are cut again; lower cuts more often
    band: tuple[float, float] = (0.8, 1.25)  # accepted counts of a prediction, in k; narrower evaluates more often
    skew: float = 4.0  # largest over mean block from which blocks are evened out; lower balances more often
    threshold_points: int = 128  # points per rank for the threshold, fewer for small k; more comes closer to k
    points_per_region: int = 8  # points per rank and region when regions are cut; more balances better

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

        The words stay below 6k(P-1)/P while regions and threshold fit. The limit also holds if the gradient has just
        changed completely. Then one region may receive all entries, and all sums may reach the threshold, at the owners
        and after balancing.
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
        """Return regions with about equal shares of all ranks' entries, from gathered points."""
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
        """Return the number of this rank's sums, and evenly spaced quantiles of their magnitudes."""
        num_points = min(self.threshold_points, max(MIN_POINTS, k // (32 * size)))
        # A sample is enough: its error is about a percent of the count, and its sort is ten times faster.
        looked_at = kernels(owned.values).sample(owned.values, SAMPLED_SUMS)
        ranks = torch.from_numpy(point_ranks(looked_at.numel(), num_points))
        points = kernels(looked_at).descending_points(looked_at, ranks)
        return Summary(owned.nnz, points.cpu().numpy()).note()

    def _gathered(
        self, block: SparseVector, summary: Array, state: OkTopkState, channel: Channel
    ) -> tuple[list[SparseVector], list[Array], list[int]]:
        """Return the blocks of the total, the ranks' summaries, and the sizes of the blocks at their owners."""
        if state.skewed:
            sizes = [int(size) for size in channel.gather_numbers(torch.tensor([block.nnz]))]
            return *channel.gather_blocks(_evened(block, sizes, channel), note=summary), sizes
        blocks, summaries = channel.gather_blocks(block, state.bounds[channel.comm.rank], summary)
        return blocks, summaries, [block.nnz for block in blocks]

    def _next(self, state: OkTopkState, k: int, spread: Spread, sizes: list[int], reached: float) -> OkTopkState:
        """Return the next state, the same on all ranks. `reached` sums have reached the predicted threshold."""
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
    """Return the magnitude that about `count` of all sums reach; zero if there are not more."""
    return float(spread.at(count)) if spread.total > count else 0.0


def _evened(block: SparseVector, sizes: Sequence[int], channel: Channel) -> SparseVector:
    """Return this rank's share after all blocks, end to end, are cut into equal ones."""
    rank, size = channel.comm.rank, channel.comm.size
    before = sum(sizes[:rank])
    cuts = [min(max(edge - before, 0), block.nnz) for edge in equal_bounds((0, sum(sizes)), size)]
    parts = [SparseVector.trusted((block.indices[a:b], block.values[a:b]), block.numel) for a, b in pairwise(cuts)]
    scattered = channel.scatter(block, parts)
    arrived = [part for _, part in sorted(scattered.arriving, key=lambda item: item[0])]
    channel.check_order(arrived)
    channel.keep(scattered.rounding.error)
    return SparseVector.concatenate(arrived)
