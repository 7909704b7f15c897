"""A connection between two ranks: messages, each preceded by its number and its length."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.transport.link import Link
from gradsieve.errors import MessageError

FRAME = struct.Struct("<2q")  # number and length of a message


class Connection:
    """The connection with one peer. No method waits."""

    def __init__(self, link: Link, peer: int, connected: socket.socket) -> None:
        self._link = link
        self._peer = peer
        self._socket = connected
        self._socket.setblocking(False)
        self.descriptor = connected.fileno()
        self._unsent: deque[memoryview] = deque()
        self._sent, self._expected = 0, 0  # messages
        self._arrived: deque[tuple[int, Tensor]] = deque()
        self._end: OSError | None = None  # why nothing more will arrive
        self._frame = bytearray(FRAME.size)
        self._body: Tensor | None = None  # None while a frame is being read
        self._room = memoryview(self._frame)  # the bytes yet to be read

    def __del__(self) -> None:
        self._socket.close()

    @property
    def interest(self) -> int:
        """The events to poll for."""
        return (0 if self._end else select.POLLIN) | (select.POLLOUT if self._unsent else 0)

    @property
    def all_sent(self) -> bool:
        """Whether the system has taken all bytes."""
        return not self._unsent

    def send(self, message: Tensor) -> None:
        """Start to send. The message must not change until `all_sent`."""
        self._unsent.append(memoryview(FRAME.pack(self._sent, message.numel())))
        if message.numel():
            self._unsent.append(_view(message))
        self._sent += 1
        self.push()

    def expect(self) -> int:
        """The number of the next message to take: one more at each call."""
        self._expected += 1
        return self._expected - 1

    def push(self) -> None:
        """Send as many bytes as the system takes now."""
        try:
            while self._unsent:
                self._drop(self._socket.sendmsg(list(self._unsent)[:4]))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._link.lost(self._peer, error) from error

    def _drop(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._unsent.popleft()
            if num_bytes < len(first):
                self._unsent.appendleft(first[num_bytes:])
            num_bytes -= min(num_bytes, len(first))

    @property
    def under_way(self) -> bool:
        """Whether a message has arrived in part."""
        return self._body is not None or len(self._room) < FRAME.size

    def pull(self) -> None:
        """Receive all bytes that the system has now."""
        while self._end is None:
            try:
                count = self._socket.recv_into(self._room)
            except BlockingIOError:
                return
            except OSError as error:
                self._end = error
                return
            if count == 0:
                self._end = ConnectionResetError("its connection ended")
            self._room = self._room[count:]
            if not self._room:
                self._filled()

    def _filled(self) -> None:
        """A frame or a body is complete."""
        number, length = FRAME.unpack(self._frame)
        if self._body is None and length:
            self._body = self._link.room_for(length, self._peer)
            self._room = _view(self._body)
            return
        body = torch.empty(0, dtype=torch.uint8) if self._body is None else self._body
        self._arrived.append((number, body))
        self._body, self._room = None, memoryview(self._frame)

    def take(self, number: int) -> Tensor | None:
        """The message with this number, or None if it has not arrived yet; raises if an earlier one was not taken."""
        if not self._arrived:
            self.pull()
        if not self._arrived:
            if self._end is not None:
                raise self._link.lost(self._peer, self._end) from self._end
            return None
        found, message = self._arrived.popleft()
        if found != number:
            raise MessageError(
                f"rank {self._link.rank}: malformed message from rank {self._peer}: it is number {found}, not {number}"
            )
        return message


def _view(message: Tensor) -> memoryview:
    array: Any = message.numpy()
    return memoryview(array)
