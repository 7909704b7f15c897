"""Spoken utterances: frames of features, and the text as labels for CTC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.dataset import Dataset
from gradsieve.lab.data.features import Frames

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
BLANK = 0  # CTC's label for no character
FRAMES_PER_LABEL = 2  # the model halves time, and CTC needs one frame per label


class Utterance(NamedTuple):
    """One recording and its text."""

    frames: Frames
    text: str


class SpeechBatch(NamedTuple):
    """Recordings, padded to the longest."""

    frames: Tensor  # (row, time, feature)
    lengths: Tensor  # frames per row
    labels: Tensor  # of all rows, concatenated
    label_lengths: Tensor


class SpeechPair(NamedTuple):
    """Training and test part, and the number of features per frame."""

    train: SpeechSet
    test: SpeechSet
    features: int


@dataclass(frozen=True, eq=False)
class SpeechSet(Dataset[SpeechBatch]):
    """Utterances in memory."""

    utterances: Sequence[Utterance]

    @override
    def __len__(self) -> int:
        return len(self.utterances)

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> SpeechBatch:
        chosen = [self.utterances[i] for i in indices.tolist()]
        lengths = torch.tensor([len(one.frames) for one in chosen])
        frames = torch.zeros(len(chosen), int(lengths.max()), chosen[0].frames.shape[1])
        for row, one in zip(frames, chosen, strict=True):
            row[: len(one.frames)] = torch.from_numpy(one.frames)
        labels = [encode(one.text) for one in chosen]
        return SpeechBatch(frames, lengths, torch.cat(labels), torch.tensor([len(one) for one in labels]))


def encode(text: str) -> Tensor:
    """The labels of a text."""
    labels = [ALPHABET.find(character) for character in text.upper()]
    if min(labels, default=0) <= BLANK:
        unknown = sorted({c for c in text.upper() if ALPHABET.find(c) <= BLANK})
        raise InputError(f"{text!r} cannot be labels: {unknown or 'empty'}; allowed are A to Z, apostrophe and space")
    return torch.tensor(labels)


def decode(labels: Sequence[int]) -> str:
    """The text of labels."""
    return "".join(ALPHABET[label] for label in labels)


def greedy(scores: Tensor) -> str:
    """Greedy CTC decoding of (time, label) scores: the best label per frame, without repeats and blanks."""
    best = scores.argmax(1)
    changed = torch.ones_like(best, dtype=torch.bool)
    changed[1:] = best[1:] != best[:-1]
    return decode(best[changed & (best != BLANK)].tolist())


def edit_distance(reference: Sequence[object], hypothesis: Sequence[object]) -> int:
    """The Levenshtein distance: the smallest number of insertions, deletions and substitutions."""
    row = np.arange(len(hypothesis) + 1)
    numbers: dict[object, int] = {}
    coded = np.array([numbers.setdefault(item, len(numbers)) for item in hypothesis], dtype=np.int64)
    steps = np.arange(len(hypothesis) + 1)
    for count, item in enumerate(reference, 1):
        changed = row[:-1] + (coded != numbers.get(item, -1))
        best = np.minimum(row[1:] + 1, changed)
        # An insertion costs one more than the entry to its left: a running minimum of entries minus their index.
        row = np.minimum.accumulate(np.concatenate([[count], best]) - steps) + steps
    return int(row[-1])
