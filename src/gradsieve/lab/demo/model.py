"""A small language model over bytes: the next byte from the sixteen before it (after Bengio et al., 2003)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CONTEXT = 16
BYTES = 256


class ByteModel(nn.Module):
    """Embedding, two hidden layers, a softmax over bytes; about 0.9 million parameters."""

    def __init__(self, embedding: int = 32, hidden: int = 640) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, embedding)
        self.first = nn.Sequential(nn.Linear(CONTEXT * embedding, hidden), nn.LayerNorm(hidden), nn.GELU())
        self.second = nn.Sequential(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU())
        self.head = nn.Linear(hidden, BYTES)

    def forward(self, contexts: Tensor) -> Tensor:
        """Scores of the next byte for each context."""
        features: Tensor = self.first(self.embedding(contexts).flatten(1))
        scores: Tensor = self.head(features + self.second(features))
        return scores


def seeded_model(seed: int) -> ByteModel:
    """The same on every rank, without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel()
