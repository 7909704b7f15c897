"""The papers' tasks by name: `WORKLOADS["bert"].open("default")` is ready to be trained by anything that can train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradsieve.lab.workloads.classify import ImageData, open_classification
from gradsieve.lab.workloads.language import TextData, open_language
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.pretrain import open_pretraining
from gradsieve.lab.workloads.schedule import Cosine, Exponential, Linear, Steps, set_rate
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.transcribe import SpeechData, open_transcription
from gradsieve.lab.workloads.workload import Limits, Preset, Sieve, Workload
from gradsieve.registry import Registry

__all__ = ["WORKLOADS", "Drawn", "Limits", "Metric", "Outcome", "Preset", "Sieve", "Task", "Workload", "set_rate"]

PUBLISHED = "batch, optimizer, schedule, density and periods of the Ok-Topk paper"
PARTLY = "density and warm-up of the gTop-k paper; rate and schedule as usual for the model"
SMALL = "chosen here to learn within minutes on two cores"

CIFAR_STEPS = Steps(warmup=10 / 161, milestones=(81 / 161, 122 / 161, 155 / 161))
IMAGENET_STEPS = Steps(warmup=5 / 90, milestones=(30 / 90, 60 / 90, 80 / 90))
GTOPK = Sieve("gtopk", density=0.001, warmup=(0.015625, 0.004))


def _presets(**presets: Preset) -> Registry[Preset]:
    return Registry("preset", presets)


def _pictures(rate: float, side: int = 32, epochs: int = 12) -> Preset:
    sgd = Sgd(rate, momentum=0.9, weight_decay=5e-4)
    return Preset("small", ImageData("digits", side), 16, epochs, sgd, Cosine(0.1), note=SMALL)


def _on_cifar(preset: Preset, epochs: int = 10) -> Preset:
    return replace(preset, data=replace(preset.data, source="cifar10"), batch=32, epochs=epochs)


_IMAGE: dict[str, Any] = {"sources": ("digits", "cifar10"), "open_task": open_classification}
_LARGE_IMAGE: dict[str, Any] = {"sources": ("digits", "cifar10", "imagenet"), "open_task": open_classification}

WORKLOADS: Registry[Workload] = Registry(
    "workload",
    {
        workload.name: workload
        for workload in (
            Workload(
                "vgg16",
                "VGG-16 tells pictures apart",
                "vgg16",
                presets=_presets(
                    default=_pictures(0.05),
                    cifar10=_on_cifar(_pictures(0.05)),
                    paper=Preset(
                        "paper", ImageData("cifar10"), 16, 161, Sgd(0.1, 0.9, 1e-4), CIFAR_STEPS, note=PUBLISHED
                    ),
                ),
                **_IMAGE,
            ),
            Workload(
                "resnet20",
                "ResNet-20 tells pictures apart",
                "resnet20",
                presets=_presets(
                    default=_pictures(0.1, side=16),
                    cifar10=_on_cifar(_pictures(0.1)),
                    paper=Preset(
                        "paper", ImageData("cifar10"), 32, 161, Sgd(0.1, 0.9, 1e-4), CIFAR_STEPS, GTOPK, note=PARTLY
                    ),
                ),
                **_IMAGE,
            ),
            Workload(
                "resnet50",
                "ResNet-50 tells pictures apart",
                "resnet50",
                presets=_presets(
                    default=_pictures(0.05, side=64),
                    cifar10=_on_cifar(_pictures(0.05, side=64)),
                    paper=Preset(
                        "paper", ImageData("imagenet", 224), 32, 90, Sgd(0.1, 0.9, 1e-4), IMAGENET_STEPS, GTOPK,
                        note=PARTLY,
                    ),
                ),
                **_LARGE_IMAGE,
            ),
            Workload(
                "alexnet",
                "AlexNet tells pictures apart",
                "alexnet",
                presets=_presets(
                    default=_pictures(0.02, side=64),
                    cifar10=_on_cifar(_pictures(0.02, side=64)),
                    paper=Preset(
                        "paper", ImageData("imagenet", 224), 64, 90, Sgd(0.01, 0.9, 5e-4), IMAGENET_STEPS, GTOPK,
                        note=PARTLY,
                    ),
                ),
                **_LARGE_IMAGE,
            ),
            Workload(
                "lstm",
                "An LSTM tells the next symbol of a text",
                "lstm",
                sources=("library", "text"),
                presets=_presets(
                    default=Preset(
                        "small", TextData(length=64), 16, 1, Adam(3e-3), Cosine(0.05), Sieve(), clip_norm=1.0, note=SMALL
                    ),
                    paper=Preset(
                        "paper",
                        TextData(symbols="pieces", vocabulary=10_000, length=35),
                        32, 55, Sgd(1.0, momentum=0.0), Exponential(14 / 55, 1.15 ** (14 - 55)), GTOPK,
                        clip_norm=10.0, note=PARTLY,
                    ),
                ),
                open_task=open_language,
            ),
            Workload(
                "deepspeech",
                "Deep Speech 2 writes down what is said",
                "deepspeech",
                sources=("synthetic", "an4"),
                presets=_presets(
                    default=Preset(
                        "small", SpeechData(), 8, 12, Adam(2e-3), Cosine(0.05), Sieve(), clip_norm=400.0, note=SMALL
                    ),
                    an4=Preset(
                        "small", SpeechData("an4"), 8, 30, Adam(2e-3), Cosine(0.05), Sieve(), clip_norm=400.0, note=SMALL
                    ),
                    paper=Preset(
                        "paper", SpeechData("an4", "spectrogram"), 2, 100, Sgd(1e-3, 0.9), clip_norm=400.0,
                        note=PUBLISHED,
                    ),
                ),
                open_task=open_transcription,
            ),
            Workload(
                "bert",
                "BERT tells hidden word pieces and whether segments belong together",
                "bert",
                sources=("library", "text"),
                presets=_presets(
                    default=Preset(
                        "small",
                        TextData(symbols="pieces", vocabulary=4096, length=64),
                        16, 1, Adam(1e-3, 0.01), Linear(0.1), Sieve(density=0.01, threshold_every=128),
                        clip_norm=1.0, note=SMALL,
                    ),
                    paper=Preset(
                        "paper",
                        TextData(symbols="pieces", vocabulary=30_522, length=128),
                        8, 3, Adam(2e-4, 0.01), Linear(0.01), Sieve(density=0.01, threshold_every=128),
                        clip_norm=1.0, note=PUBLISHED,
                    ),
                ),
                open_task=open_pretraining,
            ),
        )
    },
)  # fmt: skip
