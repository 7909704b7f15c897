"""Windows of one long text, ordered so that each batch continues the previous one.

The windows of an epoch are cut into as many columns as a step of all ranks has rows, and a step takes the next window
of every column. So a recurrent model can carry its state from step to step. Windows that do not fill all columns come
last: as a separate step, or, if that would leave a rank without windows, together with the last step.

The state is the list of cuts of this epoch: rows, ranks and steps of each. If a run is resumed on another number of
ranks, the rest of all columns is cut again, and every window still comes once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.lab.data.sampler import Draw, Sampler, Share, require_same_samples


class StreamSampler(Sampler):
    """Windows in the order of the text, in columns. The order is the same in every epoch."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.epoch = 0
        self.cuts: list[tuple[int, int, int]] = []

    @property
    @override
    def progress(self) -> float:
        return self.epoch + 1 - len(self._rest(self.cuts)) / self.share.num_samples

    @property
    @override
    def steps_left(self) -> int:
        return self.share.steps(len(self._rest(self.cuts)))

    @override
    def __iter__(self) -> Iterator[Draw]:
        epoch, (before, done) = self.epoch, self._current()
        order = self._rest(before)
        rows = self.share.batch * self.share.size
        length = len(order) // rows
        total = self.share.steps(len(order))
        for step in range(done, total):
            last = step == total - 1
            windows, whole = _step(order, rows, length, step, last)
            mine = windows[self.share.cut(len(windows))]
            seed = self.share.draw_seed(epoch, len(before) * self.share.num_samples + step)
            cuts = [*before, (self.share.batch, self.share.size, step + 1)]
            self.epoch, self.cuts = (epoch + 1, []) if last else (epoch, cuts)
            yield Draw(mine, epoch, seed, fresh=step == 0 or not whole)

    @override
    def state_dict(self) -> dict[str, Any]:
        cuts = [list(cut) for cut in self.cuts]
        return {"epoch": self.epoch, "cuts": cuts, "num_samples": self.share.num_samples}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same_samples(state, self.share)
        self.epoch = state["epoch"]
        self.cuts = [(batch, size, steps) for batch, size, steps in state["cuts"]]
        if len(self._rest(self.cuts)) < self.share.size:
            self.epoch, self.cuts = self.epoch + 1, []

    def _current(self) -> tuple[list[tuple[int, int, int]], int]:
        """The finished cuts, and the steps done in the current cut if it has the same batch and ranks."""
        if self.cuts and self.cuts[-1][:2] == (self.share.batch, self.share.size):
            return self.cuts[:-1], self.cuts[-1][2]
        return self.cuts, 0

    def _rest(self, cuts: list[tuple[int, int, int]]) -> Tensor:
        """The windows that remain after these cuts, in the order of the text within each column."""
        order = torch.arange(self.share.num_samples)
        for batch, size, steps in cuts:
            rows = batch * size
            length = len(order) // rows
            columns, tail = order[: rows * length].view(rows, length), order[rows * length :]
            order = torch.cat([columns[:, steps:].flatten(), tail])
        return order


def _step(order: Tensor, rows: int, length: int, step: int, last: bool) -> tuple[Tensor, bool]:
    """The windows of a step of all ranks, and whether they are exactly one per column."""
    columns, tail = order[: rows * length].view(rows, length), order[rows * length :]
    if step >= length:
        return tail, False
    if last and len(tail):
        return torch.cat([columns[:, step], tail]), False
    return columns[:, step], True
