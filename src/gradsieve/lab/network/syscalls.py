"""System calls on namespaces, for which Python has functions only from 3.12 on, or none."""

from __future__ import annotations

import ctypes
import os

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
NEW_USER = 0x10000000  # CLONE_NEWUSER
NEW_NETWORK = 0x40000000  # CLONE_NEWNET

BIND = 0x1000  # MS_BIND
RECURSIVE = 0x4000  # MS_REC
SLAVE = 0x80000  # MS_SLAVE


def setns(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace of an open file."""
    _checked(ctypes.CDLL(None, use_errno=True).setns(descriptor, kind), "setns")


def unshare(kinds: int) -> None:
    """Move the calling process into new namespaces."""
    _checked(ctypes.CDLL(None, use_errno=True).unshare(kinds), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, bind a path to another, or change how mounts propagate."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    code = ctypes.CDLL(None, use_errno=True).mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    _checked(code, "mount", target)


def _checked(code: int, name: str, path: str | None = None) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", path)
