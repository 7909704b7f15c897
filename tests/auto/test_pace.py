"""The time per byte of a network, measured in a moment."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gradsieve.auto.network import measured_pace
from gradsieve.comm import Comm, CountingComm
from gradsieve.testing import run_ranks


class Slow(CountingComm):
    """A network with a latency of a millisecond, on which every byte that a rank sends takes 0.1 microseconds."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        sent = 2 * (self.size - 1) * tensor.numel() * tensor.element_size() / self.size
        time.sleep(1e-3 + 1e-7 * sent)
        return super().all_reduce(tensor)


def test_latency_is_not_taken_for_bandwidth() -> None:
    found = run_ranks(3, lambda comm: measured_pace(Slow(comm), 1e9))
    assert len(set(found)) == 1
    assert 0.7e-7 < found[0].seconds_per_byte < 2e-7
    assert found[0].cost_seconds >= 0.05


def test_no_more_bytes_than_the_model_has() -> None:
    def sent(comm: Comm) -> int:
        counting = CountingComm(comm)
        measured_pace(counting, 1 << 18)
        return counting.traffic.bytes_sent

    assert max(run_ranks(2, sent)) < 2 << 18


def test_only_zeros_are_summed() -> None:
    def summed(comm: Comm) -> list[bool]:
        seen: list[bool] = []

        class Looking(CountingComm):
            def all_reduce(self, tensor: Tensor) -> Tensor:
                seen.append(bool(torch.any(tensor)))
                return super().all_reduce(tensor)

        measured_pace(Looking(comm), 1 << 16)
        return seen

    assert not any(any(seen) for seen in run_ranks(2, summed))
