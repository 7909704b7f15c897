"""All baselines by name."""

from __future__ import annotations

from math import prod

from gradsieve.lab.baselines import hooks
from gradsieve.lab.baselines.baseline import WHOLE_MODEL_MB, Baseline, Shapes, dense_bytes
from gradsieve.lab.baselines.grace import grace_baselines
from gradsieve.lab.baselines.power_sgd import power_sgd_baselines
from gradsieve.registry import Registry


def _half_bytes(shapes: Shapes, size: int) -> float:
    return dense_bytes(shapes, size) / 2


def _gathered_bytes(shapes: Shapes, size: int) -> float:
    return (size - 1) * sum(map(prod, shapes))


def _averaging_bytes(shapes: Shapes, size: int) -> float:
    return dense_bytes(shapes, size) / hooks.LOCAL_STEPS


BASELINES: Registry[Baseline] = Registry(
    "baseline",
    {
        "ddp": Baseline("DDP without a hook: dense all_reduce"),
        "fp16": Baseline("all_reduce in float16", hooks.fp16, bytes_received=_half_bytes),
        "bf16": Baseline("all_reduce in bfloat16", hooks.bf16, bytes_received=_half_bytes),
        **power_sgd_baselines(),
        "quantized-8bit": Baseline(
            "all_gather of 8-bit values", hooks.quantized, WHOLE_MODEL_MB, bytes_received=_gathered_bytes
        ),
        "local-sgd": Baseline(
            f"post-local SGD: no gradients exchanged, the model averaged every {hooks.LOCAL_STEPS} steps; "
            "times are per step",
            hooks.post_local_sgd,
            begins_late=True,
            local_steps=hooks.LOCAL_STEPS,
            bytes_received=_averaging_bytes,
        ),
        **grace_baselines(),
    },
)
