"""LSTM language model in the large shape of Zaremba et al., 2014, which the gTop-k paper trains on Penn Treebank.

Embedding, two LSTM layers of 1,500, dropout before, between and after them, a softmax with its own weights. With a
vocabulary V, embedding E, hidden H and L layers the parameters are V E + (4 H (E + H) + 8 H) + (L - 1)(8 H H + 8 H) +
V H + V: 66,034,000 in the paper's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

Carry = tuple[Tensor, Tensor]
"""Hidden and cell state of all layers, carried from one window of text to the next."""


@dataclass(frozen=True)
class LstmShape:
    """Layers, widths and vocabulary."""

    vocabulary: int = 10_000
    embedding: int = 1500
    hidden: int = 1500  # wider learns more; time grows with its square
    layers: int = 2
    dropout: float = 0.65  # higher regularizes more and slows the start
    spread: float = 0.04  # initial weights are uniform in (-spread, spread)


class LstmLanguageModel(nn.Module):
    """Maps symbols to scores of each next symbol."""

    def __init__(self, shape: LstmShape) -> None:
        super().__init__()
        between = shape.dropout if shape.layers > 1 else 0.0
        self.embedding = nn.Embedding(shape.vocabulary, shape.embedding)
        self.dropout = nn.Dropout(shape.dropout)
        self.lstm = nn.LSTM(shape.embedding, shape.hidden, shape.layers, dropout=between, batch_first=True)
        self.head = nn.Linear(shape.hidden, shape.vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -shape.spread, shape.spread)

    @override
    def forward(self, tokens: Tensor, carry: Carry | None = None) -> tuple[Tensor, Carry]:
        """Scores for (batch, time) symbols, and the state after the last one. The initial state is zero by default."""
        features, after = self.lstm(self.dropout(self.embedding(tokens)), carry)
        return self.head(self.dropout(features)), after


def count_lstm_parameters(shape: LstmShape) -> int:
    """The closed form in the module's docstring."""
    gates = 4 * shape.hidden
    first = gates * (shape.embedding + shape.hidden) + 2 * gates
    others = (shape.layers - 1) * (2 * gates * shape.hidden + 2 * gates)
    return shape.vocabulary * (shape.embedding + shape.hidden + 1) + first + others
