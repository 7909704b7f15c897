"""Speech to characters: connectionist temporal classification (Graves et al., 2006), error rates by greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.lab.data.an4 import read_an4
from gradsieve.lab.data.features import FeatureKind
from gradsieve.lab.data.speech import BLANK, SpeechBatch, SpeechPair, decode, edit_distance, greedy
from gradsieve.lab.data.spoken import read_synthetic
from gradsieve.lab.data.subset import first
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.schedule import Cosine
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.workload import PUBLISHED, SMALL, Limits, Preset, Workload, presets, unknown_source

SOURCES = ("synthetic", "an4")


@dataclass(frozen=True)
class SpeechData:
    """The source of recordings and their features."""

    source: str = "synthetic"
    features: FeatureKind = "cepstra"  # a spectrogram carries more information, and makes the model larger and slower
    num_train: int = 600  # of generated utterances; of recordings, all are used
    num_test: int = 100

    def read(self, path: Path | None) -> SpeechPair:
        """The training and the test part."""
        match self.source:
            case "synthetic":
                return read_synthetic(self.features, self.num_train, self.num_test)
            case "an4":
                return read_an4(path, self.features)
        raise unknown_source(self.source, SOURCES)


@dataclass(frozen=True, eq=False)
class Transcription(Task[SpeechBatch]):
    """Transcribes speech."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("character_error_rate", False, "{:.1%}"),
        Metric("word_error_rate", False, "{:.1%}"),
        Metric("loss", False),
    )
    num_sums: ClassVar[int] = 6

    @override
    def loss(self, model: nn.Module, batch: Drawn[SpeechBatch], carry: Any = None) -> Outcome:
        """Mean over utterances of the sum over labels, as the papers' learning rate and clipping assume."""
        scores, lengths = model(batch.data.frames, batch.data.lengths)
        return Outcome(_ctc(scores, lengths, batch.data) / len(lengths))

    @override
    def tally(self, model: nn.Module, data: SpeechBatch) -> Tensor:
        """Numbers of characters, character errors, words, word errors and utterances, and the sum of the loss."""
        scores, lengths = model(data.frames, data.lengths)
        texts = [decode(labels.tolist()) for labels in torch.split(data.labels.cpu(), data.label_lengths.tolist())]
        decoded = [greedy(row[:length]) for row, length in zip(scores.cpu(), lengths.tolist(), strict=True)]
        pairs = list(zip(texts, decoded, strict=True))
        wrong = sum(edit_distance(*pair) for pair in pairs)
        wrong_words = sum(edit_distance(one.split(), other.split()) for one, other in pairs)
        words = sum(len(text.split()) for text in texts)
        total = float(_ctc(scores, lengths, data))
        return torch.tensor([sum(map(len, texts)), wrong, words, wrong_words, len(texts), total], dtype=torch.float64)

    @override
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """Edits per character and per word, and the mean loss per utterance."""
        characters, wrong, words, wrong_words, count, total = sums.tolist()
        return {
            "character_error_rate": wrong / characters,
            "word_error_rate": wrong_words / words,
            "loss": total / count,
        }


def open_transcription(
    architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits
) -> Transcription:
    """Read the recordings, and build the task for their number of features."""
    pair = preset.data.read(path)
    shape = architecture.shape(preset.size, features=pair.features)
    train, test = first(pair.train, limits.train), first(pair.test, limits.test)
    return Transcription(train, test, architecture, shape, preset.batch, test_batch=16)


def _ctc(scores: Tensor, lengths: Tensor, data: SpeechBatch) -> Tensor:
    """The sum over the batch. An utterance that is too short for its labels counts as zero."""
    return functional.ctc_loss(
        scores.transpose(0, 1), data.labels, lengths, data.label_lengths, BLANK, reduction="sum", zero_infinity=True
    )


def _small(data: SpeechData, epochs: int) -> Preset:
    # No first moments, as for the LSTM: with them, dense learns much more slowly.
    optimizer = Adam(4e-3, betas=(0.0, 0.999))
    return Preset("small", data, 8, epochs, optimizer, Cosine(0.05), clip_norm=400.0, note=SMALL)


DEEPSPEECH = Workload(
    "deepspeech",
    "transcribes speech",
    "deepspeech",
    SOURCES,
    presets(
        default=_small(SpeechData(), epochs=20),
        an4=_small(SpeechData("an4"), epochs=40),
        paper=Preset(
            "paper",
            SpeechData("an4", "spectrogram"),
            batch=2,
            epochs=100,
            optimizer=Sgd(1e-3, momentum=0.9),
            clip_norm=400.0,
            note=f"{PUBLISHED}; number of epochs chosen here",
        ),
    ),
    open_transcription,
)
