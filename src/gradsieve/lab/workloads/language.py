"""The next symbol of a text: cross entropy, perplexity and accuracy.

In training the model's state goes from one window to the next (truncated back-propagation through time). In testing
every window starts afresh, so that scores do not depend on how many workers share the test; test windows are long
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

from gradsieve.errors import InputError
from gradsieve.lab.data.corpus import Corpus, is_treebank, read_library, read_text
from gradsieve.lab.data.sampler import Sampler, Share
from gradsieve.lab.data.stream import StreamSampler
from gradsieve.lab.data.tokens import Tokens, as_bytes, as_pieces, as_words
from gradsieve.lab.data.windows import TokenBatch, WindowSet
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.schedule import Cosine, Exponential
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task, first
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
TEST_WINDOWS = 16  # how much longer a window is in testing


@dataclass(frozen=True)
class TextData:
    """Which text, and how it is cut."""

    source: str = "library"
    symbols: Literal["bytes", "pieces"] = "bytes"  # pieces say more each, and need a larger model
    vocabulary: int = 256
    length: int = 64  # symbols of a window; more lets gradients reach further back, and costs memory

    def read(self, path: Path | None) -> Tokens:
        """Both parts as numbers."""
        return self.encode(self.corpus(path), path)

    def corpus(self, path: Path | None) -> Corpus:
        """The text itself."""
        match self.source:
            case "library" | "library-all":
                return read_library(with_tests=self.source == "library-all")
            case "text":
                return read_text(path)
        raise unknown_source(self.source, SOURCES)

    def encode(self, corpus: Corpus, path: Path | None) -> Tokens:
        """The text as numbers; Penn Treebank, which is known by its path, comes in words already."""
        if self.symbols == "bytes":
            return as_bytes(corpus)
        if self.symbols != "pieces":
            raise InputError(f"symbols must be bytes or pieces, got {self.symbols!r}")
        is_words = self.source == "text" and is_treebank(path)
        return as_words(corpus, self.vocabulary) if is_words else as_pieces(corpus, self.vocabulary)


@dataclass(frozen=True, eq=False)
class Language(Task[TokenBatch]):
    """Which symbol comes next."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", False, "{:.2f}"),
        Metric("loss", False),
        Metric("accuracy", True, "{:.1%}"),
    )
    num_sums: ClassVar[int] = 3

    def sampler(self, rank: int = 0, size: int = 1, seed: int = 0) -> Sampler:
        """Windows that continue each other."""
        return StreamSampler(Share(len(self.train), self.batch, rank, size, seed))

    def loss(self, model: nn.Module, batch: Drawn[TokenBatch], carry: Any = None) -> Outcome:
        """Cross entropy; the state after the last symbol is carried on."""
        scores, after = model(batch.data.inputs, None if batch.fresh else carry)
        return Outcome(cross_entropy(scores, batch.data.targets, "mean"), tuple(part.detach() for part in after))

    def tally(self, model: nn.Module, data: TokenBatch) -> Tensor:
        """Symbols, those told rightly, cross entropy."""
        scores, _ = model(data.inputs)
        return tally_symbols(scores, data.targets)

    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """Perplexity and cross entropy of a symbol, and the share told rightly."""
        count, right, total = sums.tolist()
        return {"perplexity": math.exp(min(total / count, 700)), "loss": total / count, "accuracy": right / count}


def open_language(architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits) -> Language:
    """With as many symbols as the text has."""
    tokens = preset.data.read(path)
    length = preset.data.length
    shape = architecture.shape(preset.size, vocabulary=tokens.vocabulary)
    train = first(WindowSet(tokens.train, length), limits.train)
    test = first(WindowSet(tokens.test, min(TEST_WINDOWS * length, len(tokens.test) - 1)), limits.test)
    return Language(train, test, architecture, shape, preset.batch, test_batch=32)


def tally_symbols(scores: Tensor, targets: Tensor) -> Tensor:
    """Symbols, those told rightly, the sum of their cross entropy."""
    right = (scores.argmax(2) == targets).sum()
    total = cross_entropy(scores, targets, "sum")
    return torch.stack([torch.tensor(targets.numel()), right.cpu(), total.cpu()]).double()


def cross_entropy(scores: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    """Of (batch, time, vocabulary) scores for (batch, time) symbols, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction=reduction)


LSTM = Workload(
    "lstm",
    "tells the next symbol of a text",
    "lstm",
    SOURCES,
    presets(
        default=Preset(
            "small",
            TextData(length=64),
            batch=16,
            epochs=0.25,
            # No first moments: dense learns more in as many steps without them, and error feedback is momentum enough.
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
            schedule=Exponential(hold=14 / 55, final=1.15 ** (14 - 55)),  # Zaremba et al.: by 1.15 an epoch after 14
            sieve=GTOPK,
            clip_norm=10.0,
            note=PARTLY,
        ),
    ),
    open_language,
)
