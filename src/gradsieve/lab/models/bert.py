"""BERT with both heads of its pre-training (Devlin et al., 2019): masked words and next sentence.

Post-norm encoder; a pooler on the first position for the next-sentence head; a transform, a norm and a decoder for the
masked words. BERT-base with 30,522 words has 133,547,324 parameters when the decoder has a weight matrix of its own, as
the Ok-Topk paper counts: embeddings 23,837,184, encoder 85,054,464, pooler 590,592, masked-word head 24,063,546, next-
sentence head 1,538. Sharing the decoder with the embedding, as the original does, would make it 110,106,428.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-12
SPREAD = 0.02  # standard deviation of fresh weights


@dataclass(frozen=True)
class BertShape:
    """How large, and how many words there are."""

    vocabulary: int = 30_522
    hidden: int = 768  # more learns more; time grows with its square
    layers: int = 12
    heads: int = 12
    feedforward: int = 3072
    positions: int = 512  # the longest sequence
    dropout: float = 0.1  # more regularizes more


class Bert(nn.Module):
    """Word pieces of two segments to scores of words at chosen places, and of one segment following the other."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.words = nn.Embedding(shape.vocabulary, hidden)
        self.positions = nn.Embedding(shape.positions, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.next_head = nn.Linear(hidden, 2)
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden, eps=EPSILON))
        self.decoder = nn.Linear(hidden, shape.vocabulary)
        self.apply(_init)

    def forward(self, tokens: Tensor, segments: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of words at `places` of the flattened (batch, time) grid, and of (follows, does not) a sequence."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.words(tokens) + self.positions(positions) + self.segments(segments)
        features = self.dropout(self.norm(features))
        for layer in self.encoder:
            features = layer(features)
        follows: Tensor = self.next_head(self.pooler(features[:, 0]).tanh())
        chosen = features.flatten(0, 1)[places]
        return self.decoder(self.transform(chosen)), follows


class _Layer(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads, self.attention_dropout = shape.heads, shape.dropout
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.attended_norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.widen, self.narrow = nn.Linear(hidden, shape.feedforward), nn.Linear(shape.feedforward, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Attend, then transform each position."""
        query, key, value = (
            project(features).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        drop = self.attention_dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        attended = self.dropout(self.output(seen.transpose(1, 2).flatten(2)))
        features = self.attended_norm(features + attended)
        widened = functional.gelu(self.widen(features))
        normed: Tensor = self.norm(features + self.dropout(self.narrow(widened)))
        return normed


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=SPREAD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
