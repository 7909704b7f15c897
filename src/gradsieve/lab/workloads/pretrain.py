"""BERT's pre-training: masked pieces, and whether one segment follows the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.masked import MaskedBatch, MaskedSet
from gradsieve.lab.data.subset import first
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.language import SOURCES, TextData
from gradsieve.lab.workloads.optimizer import Adam
from gradsieve.lab.workloads.schedule import Linear
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.workload import MEDIUM, PUBLISHED, SMALL, Limits, Preset, Sieve, Workload, presets


@dataclass(frozen=True, eq=False)
class Pretraining(Task[MaskedBatch]):
    """Trains the sum of both cross entropies. Runs are compared by that of the masked pieces."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("masked_loss", False),
        Metric("masked_accuracy", True, "{:.1%}"),
        Metric("next_accuracy", True, "{:.1%}"),
    )
    num_sums: ClassVar[int] = 5

    @override
    def loss(self, model: nn.Module, batch: Drawn[MaskedBatch], carry: Any = None) -> Outcome:
        data = batch.data
        words, follows = model(data.tokens, data.segments, data.masked)
        return Outcome(functional.cross_entropy(words, data.words) + functional.cross_entropy(follows, data.follows))

    @override
    def tally(self, model: nn.Module, data: MaskedBatch) -> Tensor:
        """Masked pieces, correct ones, the sum of their cross entropy; pairs of segments, correct ones."""
        words, follows = model(data.tokens, data.segments, data.masked)
        total = functional.cross_entropy(words, data.words, reduction="sum")
        correct, correct_pairs = (words.argmax(1) == data.words).sum(), (follows.argmax(1) == data.follows).sum()
        counts = torch.tensor([len(data.words), len(data.follows)]).double()
        return torch.stack([counts[0], correct.cpu(), total.cpu(), counts[1], correct_pairs.cpu()]).double()

    @override
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        count, correct, total, pairs, correct_pairs = sums.tolist()
        accuracies = {"masked_accuracy": correct / count, "next_accuracy": correct_pairs / pairs}
        return {"masked_loss": total / count, **accuracies}


def open_pretraining(architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits) -> Pretraining:
    """Read the text, and build the task for the pieces of a BPE learned from it."""
    if preset.data.symbols != "pieces":
        raise InputError(f"symbols must be pieces for BERT, got {preset.data.symbols!r}")
    tokens = preset.data.read(path)
    shape = architecture.shape(preset.size, vocabulary=tokens.vocabulary)
    if preset.data.length > shape.positions:
        raise InputError(f"length must be at most {shape.positions}, the model's positions, got {preset.data.length}")
    sets = [MaskedSet(part, preset.data.length, tokens.vocabulary) for part in (tokens.train, tokens.test)]
    train, test = first(sets[0], limits.train), first(sets[1], limits.test)
    return Pretraining(train, test, architecture, shape, preset.batch, test_batch=64)


BERT = Workload(
    "bert",
    "predicts masked word pieces, and whether one segment follows the other",
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
