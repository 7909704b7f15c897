"""What codes of indices and codes of values have in common, and what every code of values does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from gradsieve.vector import SparseVector

Array = np.ndarray[Any, np.dtype[Any]]


class Code(ABC):
    """How one half of a message is written; one 64-bit word says it to the receiver."""

    kind: ClassVar[int]

    @property
    def word(self) -> int:
        """For the header: the kind in the lowest byte, what else must be known above it."""
        return self.kind

    @property
    @abstractmethod
    def num_words(self) -> int:
        """64-bit words that it takes."""

    def cleared(self, words: Array) -> Array:
        """The words, as `write` needs them."""
        words[:] = 0
        return words


class ValueCode(Code):
    """How the values of one message are written."""

    largest: ClassVar[float] = float(np.finfo(np.float32).max)  # magnitude that it can hold
    count: int

    @abstractmethod
    def write(self, values: Array, words: Array) -> Array:
        """Fill `words`, which are `cleared`; the values as the receiver will see them come back."""

    def write_vector(self, vector: SparseVector, values: Array, words: Array) -> SparseVector:
        """`write` the values of a vector; it comes back as the receiver will see it: itself, if nothing is rounded."""
        seen = self.write(values, words)
        return vector if seen is values else vector.with_values([torch.from_numpy(seen).to(vector.values.device)])

    def undecoded(self, words: Array, start: int, numel: int) -> SparseVector | None:
        """The run of float32 that `read` gives the values of, if it can be decoded later, to where it is needed."""
        return None

    @abstractmethod
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """The values; `words` has one word more than `num_words`."""
