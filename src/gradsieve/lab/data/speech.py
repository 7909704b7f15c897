"""Spoken utterances: frames of features, and what was said as labels for CTC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.lab.data.features import Frames

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
BLANK = 0  # the label that stands for none of the others
FRAMES_PER_LABEL = 2  # the model halves time, and CTC needs a frame a label


class Utterance(NamedTuple):
    """One recording."""

    frames: Frames
    text: str


class SpeechBatch(NamedTuple):
    """Recordings filled up to the longest."""

    frames: Tensor  # (row, time, feature)
    lengths: Tensor  # frames of each row
    labels: Tensor  # of all rows, one after the other
    label_lengths: Tensor


class SpeechPair(NamedTuple):
    """What is trained on, what is tested on, and how many features a frame has."""

    train: SpeechSet
    test: SpeechSet
    features: int


@dataclass(frozen=True, eq=False)
class SpeechSet:
    """Utterances held in memory."""

    utterances: Sequence[Utterance]

    def __len__(self) -> int:
        return len(self.utterances)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> SpeechBatch:
        """These utterances; nothing about them is random."""
        chosen = [self.utterances[i] for i in indices.tolist()]
        lengths = torch.tensor([len(one.frames) for one in chosen])
        frames = torch.zeros(len(chosen), int(lengths.max()), chosen[0].frames.shape[1])
        for row, one in zip(frames, chosen, strict=True):
            row[: len(one.frames)] = torch.from_numpy(one.frames)
        labels = [encode(one.text) for one in chosen]
        return SpeechBatch(frames, lengths, torch.cat(labels), torch.tensor([len(one) for one in labels]))


def encode(text: str) -> Tensor:
    """Characters to labels."""
    labels = [ALPHABET.find(character) for character in text.upper()]
    if min(labels, default=0) <= BLANK:
        strange = sorted({c for c in text.upper() if ALPHABET.find(c) <= BLANK})
        raise InputError(f"{text!r} cannot be labels: {strange or 'empty'}; allowed are A to Z, apostrophe and space")
    return torch.tensor(labels)


def decode(labels: Sequence[int]) -> str:
    """Labels to characters."""
    return "".join(ALPHABET[label] for label in labels)


def greedy(scores: Tensor) -> str:
    """The best label of each (time, label) frame, repeats taken once, blanks left out."""
    best = scores.argmax(1)
    changed = torch.ones_like(best, dtype=torch.bool)
    changed[1:] = best[1:] != best[:-1]
    return decode(best[changed & (best != BLANK)].tolist())


def edit_distance(said: Sequence[object], heard: Sequence[object]) -> int:
    """Fewest insertions, deletions and changes from one to the other (Levenshtein)."""
    row = np.arange(len(heard) + 1)
    numbers: dict[object, int] = {}
    coded = np.array([numbers.setdefault(item, len(numbers)) for item in heard], dtype=np.int64)
    steps = np.arange(len(heard) + 1)
    for count, item in enumerate(said, 1):
        changed = row[:-1] + (coded != numbers.get(item, -1))
        best = np.minimum(row[1:] + 1, changed)
        # An insertion costs one more than the entry to its left: a running minimum over entries minus their place.
        row = np.minimum.accumulate(np.concatenate([[count], best]) - steps) + steps
    return int(row[-1])
