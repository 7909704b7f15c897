"""The base classes of codes: how indices and how values are written in a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from gradsieve.vector import Rounding, SparseVector

Array = np.ndarray[Any, np.dtype[Any]]


class Code(ABC):
    """How the indices or the values of one message are written. One 64-bit word of the header describes it."""

    kind: ClassVar[int]

    @property
    def word(self) -> int:
        """The header's word: the kind in the lowest byte, parameters above it."""
        return self.kind

    @property
    @abstractmethod
    def num_words(self) -> int:
        """The number of 64-bit words in the message."""

    def cleared(self, words: Array) -> Array:
        """Set to zero what `write` does not overwrite; returns the words."""
        words[:] = 0
        return words


class ValueCode(Code):
    """How the values of one message are written."""

    count: int

    @property
    def is_exact(self) -> bool:
        """Whether the receiver decodes every value bit for bit."""
        return False

    @abstractmethod
    def write(self, values: Array, words: Array) -> Array:
        """Fill `words`, which are `cleared`, and return the values that the receiver will decode."""

    def write_vector(self, vector: SparseVector, values: Array, words: Array) -> Rounding:
        """`write` the values of a vector."""
        decoded = self.write(values, words)
        if self.is_exact:
            return Rounding.none(vector)
        return Rounding(vector, vector.with_values([torch.from_numpy(decoded).to(vector.values.device)]))

    def undecoded(self, words: Array, start: int, numel: int) -> SparseVector | None:
        """A run of float32 that decodes its values only when they are read, or None if this code has no such form."""
        return None

    @abstractmethod
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """The values; `words` has one word more than `num_words`."""
