"""What the examples train: the next byte of Python's own sources, which every machine has."""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT_BYTES = 8
BATCH_SIZE = 64


class ByteModel(nn.Module):
    """The bytes before to the byte that follows: about 150,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.hidden = nn.Linear(CONTEXT_BYTES * 32, 256)
        self.output = nn.Linear(256, 256)

    def forward(self, contexts: Tensor) -> Tensor:
        """Scores of the 256 bytes that could follow."""
        return self.output(torch.relu(self.hidden(self.embedding(contexts).flatten(1))))


def python_bytes() -> Tensor:
    """The source of a module of the standard library."""
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(text: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A batch of its own for each rank and step, the same in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(text) - CONTEXT_BYTES, (BATCH_SIZE,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT_BYTES)], text[starts + CONTEXT_BYTES]


def hash_of(model: nn.Module) -> str:
    """Equal on two ranks if their parameters are equal, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
