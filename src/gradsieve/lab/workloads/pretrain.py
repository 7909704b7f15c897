"""BERT's two questions at once: which pieces are hidden, and whether one segment follows the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsieve.errors import InputError
from gradsieve.lab.data.masked import MaskedBatch, MaskedSet
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.language import SOURCES, TextData
from gradsieve.lab.workloads.optimizer import Adam
from gradsieve.lab.workloads.schedule import Linear
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task, first
from gradsieve.lab.workloads.workload import MEDIUM, PUBLISHED, SMALL, Limits, Preset, Sieve, Workload, presets


@dataclass(frozen=True, eq=False)
class Pretraining(Task[MaskedBatch]):
    """The sum of both cross entropies is trained; the one of hidden pieces is what runs are compared by."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("masked_loss", False),
        Metric("masked_accuracy", True, "{:.1%}"),
        Metric("next_accuracy", True, "{:.1%}"),
    )
    num_sums: ClassVar[int] = 5

    def loss(self, model: nn.Module, batch: Drawn[MaskedBatch], carry: Any = None) -> Outcome:
        """Both cross entropies, each a mean."""
        data = batch.data
        words, follows = model(data.tokens, data.segments, data.places)
        return Outcome(functional.cross_entropy(words, data.words) + functional.cross_entropy(follows, data.follows))

    def tally(self, model: nn.Module, data: MaskedBatch) -> Tensor:
        """Hidden pieces, those told rightly, their cross entropy; pairs, those told rightly."""
        words, follows = model(data.tokens, data.segments, data.places)
        total = functional.cross_entropy(words, data.words, reduction="sum")
        right, right_pairs = (words.argmax(1) == data.words).sum(), (follows.argmax(1) == data.follows).sum()
        counts = torch.tensor([len(data.words), len(data.follows)]).double()
        return torch.stack([counts[0], right.cpu(), total.cpu(), counts[1], right_pairs.cpu()]).double()

    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """Mean cross entropy of a hidden piece, and the shares told rightly."""
        count, right, total, pairs, right_pairs = sums.tolist()
        return {"masked_loss": total / count, "masked_accuracy": right / count, "next_accuracy": right_pairs / pairs}


def open_pretraining(architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits) -> Pretraining:
    """With the pieces of a BPE learned from the text."""
    if preset.data.symbols != "pieces":
        raise InputError(f"BERT reads pieces, got symbols {preset.data.symbols!r}")
    tokens = preset.data.read(path)
    shape = architecture.shape(preset.size, vocabulary=tokens.vocabulary)
    if preset.data.length > shape.positions:
        raise InputError(f"length must be at most {shape.positions}, the model's positions, got {preset.data.length}")
    sets = [MaskedSet(part, preset.data.length, tokens.vocabulary) for part in (tokens.train, tokens.test)]
    train, test = first(sets[0], limits.train), first(sets[1], limits.test)
    return Pretraining(train, test, architecture, shape, preset.batch, test_batch=64)


BERT = Workload(
    "bert",
    "tells hidden word pieces, and whether segments belong together",
    "bert",
    SOURCES,
    presets(
        default=Preset(
            "small",
            TextData(symbols="pieces", vocabulary=4096, length=64),
            batch=16,
            epochs=1,
            optimizer=Adam(1e-3, weight_decay=0.01),
            schedule=Linear(0.1),
            sieve=Sieve(density=0.01, threshold_every=128),
            clip_norm=1.0,
            note=SMALL,
        ),
        medium=Preset(
            "medium",
            TextData(symbols="pieces", vocabulary=30_522, length=128),
            batch=2,
            epochs=1,
            optimizer=Adam(5e-4, weight_decay=0.01),
            schedule=Linear(0.1),
            sieve=Sieve(density=0.01, threshold_every=128),
            clip_norm=1.0,
            note=MEDIUM,
        ),
        paper=Preset(
            "paper",
            TextData(symbols="pieces", vocabulary=30_522, length=128),
            batch=8,
            epochs=3,
            optimizer=Adam(2e-4, weight_decay=0.01),
            schedule=Linear(0.01),
            sieve=Sieve(density=0.01, threshold_every=128),
            clip_norm=1.0,
            note=f"{PUBLISHED}; length of warm-up and run chosen here",
        ),
    ),
    open_pretraining,
)
