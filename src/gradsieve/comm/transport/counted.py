"""Messages of any length through any backend: first the lengths, then the messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from gradsieve.comm.transport.link import Link, Rounds, Transport


class CountedTransport(Transport):
    """For any backend, such as NCCL: first the lengths, in one small all-to-all, then messages of known length."""

    seconds_per_byte: float = math.inf

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link = link
        self.device = device

    @override
    def all_to_all(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """All rounds in one batch, as NCCL requires. Empty messages are not sent: both ranks know of them."""
        sizes = torch.tensor([m.numel() for m in messages], dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(sizes)
        self.link.finish_call(dist.all_to_all_single, theirs, sizes)
        lengths = theirs.tolist()
        buffers = {s: self.link.room_for(lengths[s], s, self.device) for _, s in rounds}
        operations = []
        for to, source in rounds:
            if lengths[source]:
                operations.append(self._operation(dist.irecv, buffers[source], source))
            if messages[to].numel():
                operations.append(self._operation(dist.isend, messages[to], to))
        self._run(operations)
        for _, source in rounds:
            yield source, buffers[source]

    @override
    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        length = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        theirs = torch.zeros_like(length)
        self._run(self._pair(length, to, theirs, source))
        received = self.link.room_for(int(theirs), source, self.device)
        self._run(self._pair(message, to if message.numel() else None, received, source if len(received) else None))
        return None if source is None else received

    def _pair(self, out: Tensor, to: int | None, into: Tensor, source: int | None) -> list[dist.P2POp]:
        sends = [] if to is None else [self._operation(dist.isend, out, to)]
        return sends + ([] if source is None else [self._operation(dist.irecv, into, source)])

    def _operation(self, call: Any, buffer: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(call, buffer, group=self.link.group, group_peer=peer)

    def _run(self, operations: list[dist.P2POp]) -> None:
        if not operations:
            return
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.link.lost(None, error) from error
        for work in works:
            self.link.finish(work, None)
