"""Next-token prediction by a stateless model: GPT's task.

Every window is a separate sample. The windows of a part do not overlap and come in random order, so no token is a
target twice within one pass over the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from gradsieve.lab.data.corpus import Corpus, in_three
from gradsieve.lab.data.subset import first, spread
from gradsieve.lab.data.tokens import Tokens
from gradsieve.lab.data.windows import TokenBatch, WindowSet
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.language import SOURCES, TextData, cross_entropy, tally_symbols
from gradsieve.lab.workloads.optimizer import Adam
from gradsieve.lab.workloads.schedule import Cosine
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.workload import SMALL, Limits, Preset, Workload, presets

EVALUATED_WINDOWS = 2048  # default number of scored windows: all of them would take as long as training
GPUS = "the shape of GPT-2 small, for GPUs; batch, learning rate and epochs chosen here, not tried"
UNTUNED = "chosen here; the learning rate is not tuned"


@dataclass(frozen=True)
class SplitText(TextData):
    """A text in three parts. The training part does not depend on which other part is scored."""

    source: str = "library-all"
    evaluate: str = "test"  # or "validation", for tuning

    @override
    def read(self, path: Path | None) -> Tokens:
        """The training part and the scored part as token ids."""
        parts = in_three(self.corpus(path))
        scored = parts.validation if self.evaluate == "validation" else parts.test
        return self.encode(Corpus(parts.train, scored), path)


@dataclass(frozen=True, eq=False)
class Generation(Task[TokenBatch]):
    """Predicts the next token from the earlier ones in the window."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("loss", False), Metric("accuracy", True, "{:.1%}"))
    num_sums: ClassVar[int] = 3

    @override
    def loss(self, model: nn.Module, batch: Drawn[TokenBatch], carry: Any = None) -> Outcome:
        """Cross entropy in nats per token."""
        return Outcome(cross_entropy(model(batch.data.inputs), batch.data.targets, "mean"))

    @override
    def tally(self, model: nn.Module, data: TokenBatch) -> Tensor:
        return tally_symbols(model(data.inputs), data.targets)

    @override
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        count, correct, total = sums.tolist()
        return {"loss": total / count, "accuracy": correct / count}


def open_generation(architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits) -> Generation:
    """Read the text, and build the task for its vocabulary and window length.

    Scored windows are spread over the whole part.
    """
    tokens, length = preset.data.read(path), preset.data.length
    shape = architecture.shape(preset.size, vocabulary=tokens.vocabulary, context=length)
    train = first(WindowSet(tokens.train, length), limits.train)
    count = EVALUATED_WINDOWS if limits.test is None else limits.test
    scored = spread(WindowSet(tokens.test, length), count)
    return Generation(train, scored, architecture, shape, preset.batch, test_batch=32)


def _preset(size: str, data: SplitText, epochs: float, rate: float, note: str) -> Preset:
    """Settings that all sizes share."""
    return Preset(
        size,
        data,
        batch=4,
        epochs=epochs,
        optimizer=Adam(rate, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=Cosine(0.05, final=0.1),
        clip_norm=1.0,
        note=note,
    )


GPT = Workload(
    "gpt",
    "predicts the next token of a text",
    "gpt",
    SOURCES,
    presets(
        default=_preset("small", SplitText(length=64), 0.1, rate=2e-3, note=SMALL),
        **{
            "1m": _preset("1m", SplitText(length=128), 0.2, rate=2e-3, note=SMALL),
            "11m": _preset("11m", SplitText(length=128), 1, rate=1e-3, note=UNTUNED),
            "25m": _preset("25m", SplitText(length=128), 1, rate=1e-3, note=UNTUNED),
        },
        paper=_preset("paper", SplitText(symbols="pieces", vocabulary=50_257, length=1024), 1, rate=6e-4, note=GPUS),
    ),
    open_generation,
    evaluates=("test", "validation"),
)
