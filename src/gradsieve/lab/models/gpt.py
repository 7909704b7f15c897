"""GPT: a decoder-only transformer in the form of GPT-2 (Radford et al., 2019), without biases and dropout.

Layer norms come before attention, before the feed-forward part, and at the end. Positions are learned. The output head
is tied to the embedding. Only layer norms have biases. Initial weights are normal with a standard deviation of 0.02. In
a block, the two projections that add to the residual stream are smaller by a factor of sqrt(2 * layers), so that the
stream's variance does not grow with depth.

With a vocabulary V, context C, width W and L layers the parameters are V W + C W + L (12 W W + 4 W) + 2 W: 124,356,864
in the shape of GPT-2 small. GPT-2 itself has biases in all linear layers: 124,439,808.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.errors import InputError

SPREAD = 0.02  # standard deviation of initial weights
WIDENING = 4  # width of the feed-forward part relative to the model's


@dataclass(frozen=True)
class GptShape:
    """Layers, widths and vocabulary; the defaults are those of GPT-2 small."""

    vocabulary: int = 50_257
    context: int = 1024  # maximum sequence length
    width: int = 768  # wider learns more; time grows with its square
    layers: int = 12
    heads: int = 12

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InputError(f"width must be a multiple of the number of heads, got {self.width} and {self.heads}")


class Gpt(nn.Module):
    """Maps tokens to scores of each next token."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self._init_weights(shape.layers)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch, time, vocabulary) for (batch, time) tokens."""
        time, context = tokens.shape[1], self.positions.num_embeddings
        if time > context:
            raise InputError(f"a sequence must have at most {context} tokens, the model's context, got {time}")
        features = self.tokens(tokens) + self.positions.weight[:time]
        for block in self.blocks:
            features = block(features)
        return functional.linear(self.norm(features), self.tokens.weight)

    def _init_weights(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) if is_residual else SPREAD)


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, WIDENING * width, bias=False)
        self.narrow = nn.Linear(WIDENING * width, width, bias=False)

    @override
    def forward(self, features: Tensor) -> Tensor:
        features = features + self._attend(self.attention_norm(features))
        widened = functional.gelu(self.widen(self.feedforward_norm(features)))
        added: Tensor = self.narrow(widened)
        return features + added

    def _attend(self, features: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(features).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attended(seen.transpose(1, 2).flatten(2))
        return attended


def count_gpt_parameters(shape: GptShape) -> int:
    """The closed form in the module's docstring."""
    blocks = shape.layers * (12 * shape.width**2 + 4 * shape.width)
    return (shape.vocabulary + shape.context + 2) * shape.width + blocks
