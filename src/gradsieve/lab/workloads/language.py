"""Next-symbol prediction by a recurrent model: cross entropy, perplexity and accuracy.

In training the model's state is carried from one window to the next (truncated back-propagation through time). In tests
every window starts with a zero state, so that scores do not depend on the number of ranks. Test windows are longer
instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.corpus import Corpus, is_treebank, read_library, read_text
from gradsieve.lab.data.sampler import Sampler, Share
from gradsieve.lab.data.stream import StreamSampler
from gradsieve.lab.data.subset import first
from gradsieve.lab.data.tokens import Tokens, as_bytes, as_pieces, as_words
from gradsieve.lab.data.windows import TokenBatch, WindowSet
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.schedule import Cosine, Exponential
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.workload import (
    GTOPK,
    MEDIUM,
    PARTLY,
    SMALL,
    Limits,
    Preset,
    Workload,
    presets,
    unknown_source,
)

SOURCES = ("library", "library-all", "text")
TEST_WINDOWS = 16  # length of a test window in training windows


@dataclass(frozen=True)
class TextData:
    """The source of text, its symbols and its windows."""

    source: str = "library"
    symbols: Literal["bytes", "pieces"] = "bytes"  # a piece carries more information, and needs a larger model
    vocabulary: int = 256
    length: int = 64  # symbols per window; longer lets gradients reach further back, and needs more memory

    def read(self, path: Path | None) -> Tokens:
        """The training and the test part as symbol ids."""
        return self.encode(self.corpus(path), path)

    def corpus(self, path: Path | None) -> Corpus:
        """The text."""
        match self.source:
            case "library" | "library-all":
                return read_library(with_tests=self.source == "library-all")
            case "text":
                return read_text(path)
        raise unknown_source(self.source, SOURCES)

    def encode(self, corpus: Corpus, path: Path | None) -> Tokens:
        """The text as symbol ids. Penn Treebank, recognized by its path, is already split into words."""
        if self.symbols == "bytes":
            return as_bytes(corpus)
        if self.symbols != "pieces":
            raise InputError(f"symbols must be bytes or pieces, got {self.symbols!r}")
        is_words = self.source == "text" and is_treebank(path)
        return as_words(corpus, self.vocabulary) if is_words else as_pieces(corpus, self.vocabulary)


@dataclass(frozen=True, eq=False)
class Language(Task[TokenBatch]):
    """Predicts the next symbol."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", False, "{:.2f}"),
        Metric("loss", False),
        Metric("accuracy", True, "{:.1%}"),
    )
    num_sums: ClassVar[int] = 3

    @override
    def sampler(self, rank: int = 0, size: int = 1, seed: int = 0) -> Sampler:
        """A sampler whose batches continue the previous ones."""
        return StreamSampler(Share(len(self.train), self.batch, rank, size, seed))

    @override
    def loss(self, model: nn.Module, batch: Drawn[TokenBatch], carry: Any = None) -> Outcome:
        scores, after = model(batch.data.inputs, None if batch.fresh else carry)
        return Outcome(cross_entropy(scores, batch.data.targets, "mean"), tuple(part.detach() for part in after))

    @override
    def tally(self, model: nn.Module, data: TokenBatch) -> Tensor:
        scores, _ = model(data.inputs)
        return tally_symbols(scores, data.targets)

    @override
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        count, correct, total = sums.tolist()
        return {"perplexity": math.exp(min(total / count, 700)), "loss": total / count, "accuracy": correct / count}


def open_language(architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits) -> Language:
    """Read the text, and build the task for its vocabulary."""
    tokens = preset.data.read(path)
    length = preset.data.length
    shape = architecture.shape(preset.size, vocabulary=tokens.vocabulary)
    train = first(WindowSet(tokens.train, length), limits.train)
    test = first(WindowSet(tokens.test, min(TEST_WINDOWS * length, len(tokens.test) - 1)), limits.test)
    return Language(train, test, architecture, shape, preset.batch, test_batch=32)


def tally_symbols(scores: Tensor, targets: Tensor) -> Tensor:
    """Number of symbols, of correct ones, and the sum of the cross entropy."""
    correct = (scores.argmax(2) == targets).sum()
    total = cross_entropy(scores, targets, "sum")
    return torch.stack([torch.tensor(targets.numel()), correct.cpu(), total.cpu()]).double()


def cross_entropy(scores: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    """Cross entropy in nats of (batch, time, vocabulary) scores and (batch, time) symbols."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction=reduction)


LSTM = Workload(
    "lstm",
    "predicts the next symbol of a text",
    "lstm",
    SOURCES,
    presets(
        default=Preset(
            "small",
            TextData(length=64),
            batch=16,
            epochs=0.25,
            # No first moments: dense learns more per step without them, and error feedback acts like momentum.
            optimizer=Adam(0.012, betas=(0.0, 0.999)),
            schedule=Cosine(0.05),
            clip_norm=1.0,
            note=SMALL,
        ),
        medium=Preset(
            "medium",
            TextData(symbols="pieces", vocabulary=10_000, length=35),
            batch=4,
            epochs=1,
            optimizer=Adam(0.001, betas=(0.0, 0.999)),
            schedule=Cosine(0.05),
            clip_norm=1.0,
            note=MEDIUM,
        ),
        paper=Preset(
            "paper",
            TextData(symbols="pieces", vocabulary=10_000, length=35),
            batch=32,
            epochs=55,
            optimizer=Sgd(1.0, momentum=0.0),
            schedule=Exponential(hold=14 / 55, final=1.15 ** (14 - 55)),  # Zaremba et al.: by 1.15 per epoch after 14
            sieve=GTOPK,
            clip_norm=10.0,
            note=PARTLY,
        ),
    ),
    open_language,
)
