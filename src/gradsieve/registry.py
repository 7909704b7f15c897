"""Registries map names to classes. Command line, benchmarks, docs and tests take their choices from them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from gradsieve.errors import UnknownNameError

T = TypeVar("T")

SHOWN_NAMES = 24  # names listed in an error message; more would bury the sentence


class Registry(Mapping[str, T]):
    """A read-only mapping whose lookup error names the nearest entry."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise UnknownNameError(self._unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{self.kind} registry: {', '.join(self)}"

    def _unknown(self, name: object) -> str:
        near = difflib.get_close_matches(str(name).lower(), self._entries, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        shown = ", ".join(list(self)[:SHOWN_NAMES])
        more = f" and {len(self) - SHOWN_NAMES} more" if len(self) > SHOWN_NAMES else ""
        return f"unknown {self.kind} {name!r}; {hint}allowed: {shown}{more}"
