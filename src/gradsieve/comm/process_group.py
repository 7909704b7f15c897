"""Ranks of a torch.distributed process group. All calls on one group must come from one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from gradsieve.comm.protocol import Comm, rotation
from gradsieve.comm.transport import (
    CountedTransport,
    DirectTransport,
    FramedTransport,
    Link,
    SharedMemoryTransport,
    Transport,
)
from gradsieve.errors import InputError, MessageError

DEFAULT_TIMEOUT_SECONDS = 1800.0  # torch's default for Gloo


class TorchComm(Comm):
    """The ranks of a process group. Gloo and NCCL use the same calls, but NCCL has not been run yet.

    Args:
        group: The process group; the default one if not given.
        timeout_seconds: How long a call waits for a peer before it raises `PeerLostError`.
        transport: How messages of unknown length travel; by default chosen for the backend.

    Raises:
        InputError: If torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        transport: Transport | None = None,
    ) -> None:
        self.group = _member_group(group)
        if timeout_seconds <= 0:
            raise InputError(f"timeout_seconds must be positive, got {timeout_seconds}")
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._link = Link(self.group, timeout_seconds)
        # Gloo sends from main memory only, other backends from this process's device.
        gloo = dist.get_backend(self.group) == "gloo"
        self.device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        self._transport = transport or _transport(self._link, self.device, gloo)

    @property
    def seconds_per_byte(self) -> float:  # type: ignore[override]
        """As measured by the transport."""
        return self._transport.seconds_per_byte

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            raise InputError("all_reduce needs a contiguous tensor: Gloo is silently wrong on strided views")
        staged = tensor.to(self.device)
        if staged.numel() and self.size > 1:
            self._link.finish_call(dist.all_reduce, staged)
        return tensor if tensor.device == self.device else tensor.copy_(staged)

    @override
    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        own = buffers[self.rank]
        yield self.rank, own
        if self.size == 1:
            return
        messages = [self._bytes(buffer) for buffer in buffers]
        for source, message in self._transport.all_to_all(messages, rotation(self.rank, self.size)):
            yield source, self._like(message, own, source)

    @override
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        received = self._transport.send_recv(self._bytes(buffer), to, source)
        return None if received is None else self._like(received, buffer, source)

    def _bytes(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.device).view(torch.uint8)

    def _like(self, message: Tensor, buffer: Tensor, source: int | None) -> Tensor:
        if message.numel() % buffer.element_size():
            raise MessageError(
                f"rank {self.rank}: rank {source} sent {message.numel()} bytes, "
                f"which is not a whole number of {buffer.dtype} values"
            )
        return message.view(buffer.dtype).to(buffer.device)


def _transport(link: Link, device: torch.device, gloo: bool) -> Transport:
    return SharedMemoryTransport(DirectTransport(FramedTransport(link))) if gloo else CountedTransport(link, device)


def _member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "torch.distributed is not initialized: start with torchrun and call "
            "torch.distributed.init_process_group() first, or pass comm="
        )
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None or dist.get_rank(chosen) < 0:
        raise InputError("this process is not a member of the process group it was given")
    return chosen
