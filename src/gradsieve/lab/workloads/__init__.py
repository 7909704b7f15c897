"""The papers' tasks by name. `WORKLOADS["bert"].open()` is ready for any trainer; `task.py` shows how to use it."""

from __future__ import annotations

from gradsieve.lab.workloads.classify import ALEXNET, MLP, RESNET20, RESNET50, VGG16
from gradsieve.lab.workloads.generate import GPT
from gradsieve.lab.workloads.language import LSTM
from gradsieve.lab.workloads.pretrain import BERT
from gradsieve.lab.workloads.schedule import set_rate
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.transcribe import DEEPSPEECH
from gradsieve.lab.workloads.workload import Limits, Preset, Sieve, Workload
from gradsieve.registry import Registry

__all__ = ["WORKLOADS", "Drawn", "Limits", "Metric", "Outcome", "Preset", "Sieve", "Task", "Workload", "set_rate"]

WORKLOADS: Registry[Workload] = Registry(
    "workload",
    {workload.name: workload for workload in (VGG16, RESNET20, RESNET50, ALEXNET, MLP, LSTM, DEEPSPEECH, BERT, GPT)},
)
