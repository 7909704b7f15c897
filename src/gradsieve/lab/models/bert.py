"""BERT with both heads of its pre-training (Devlin et al., 2019): masked words and next sentence.

The encoder is post-norm. The next-sentence head has a pooler on the first position, the masked-word head a transform, a
norm and a decoder. BERT-base with 30,522 words has 133,547,324 parameters if the decoder has its own weight matrix, as
the Ok-Topk paper counts: embeddings 23,837,184, encoder 85,054,464, pooler 590,592, masked-word head 24,063,546,
next-sentence head 1,538. With a decoder tied to the embedding, as in the original, it would have 110,106,428.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

EPSILON = 1e-12
SPREAD = 0.02  # standard deviation of initial weights


@dataclass(frozen=True)
class BertShape:
    """Layers, widths and vocabulary."""

    vocabulary: int = 30_522
    hidden: int = 768  # wider learns more; time grows with its square
    layers: int = 12
    heads: int = 12
    feedforward: int = 3072
    positions: int = 512  # maximum sequence length
    dropout: float = 0.1  # higher regularizes more


class Bert(nn.Module):
    """Maps word pieces of two segments to word scores at masked positions and to next-sentence scores."""

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

    @override
    def forward(self, tokens: Tensor, segments: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Word scores at the positions `masked` of the flattened (batch, time) grid; (follows, does not) per row."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.words(tokens) + self.positions(positions) + self.segments(segments)
        features = self.dropout(self.norm(features))
        for layer in self.encoder:
            features = layer(features)
        follows: Tensor = self.next_head(self.pooler(features[:, 0]).tanh())
        at_masked = features.flatten(0, 1)[masked]
        return self.decoder(self.transform(at_masked)), follows


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

    @override
    def forward(self, features: Tensor) -> Tensor:
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
