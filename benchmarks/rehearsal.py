"""Loss of a small GPT whose four data-parallel ranks exchange gradients or updates in different ways, in one process.

python benchmarks/rehearsal.py --only dense onebit --out rehearsal.jsonl

All ranks are computed in one graph, each with its own gradient, and nothing is sent. A variant takes a few minutes on
one core. The script measures loss, not time, and does not use the library. Its simplifications:
- Bits are counted for the matrices only, 99.6 % of the model. All variants average vectors densely.
- Signal shares, and the step sizes of rounded values, are not counted.
- PowerSGD's factors are counted as bfloat16 but not rounded. Ok-Topk's indices are counted as 1.1 times their entropy.
- Gradients are clipped by the norm of their mean, which a real rank would have to estimate.
- Each rank owns one contiguous part of the model. The library deals entries to the ranks in turn.

The text is the source code of the Python standard library, so losses depend on the Python version. The results in
`results/rehearsal.json` are of earlier scripts, with Python 3.11.7 and one seed, and some variants are missing there.
Validation losses of the scripts differ by at most 0.0001 over 30 steps ("dense", "onebit") or 12 steps (the others).
"""

import argparse
import glob
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, cycle, islice
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

RANKS, BATCH, CONTEXT = 4, 4, 64  # BATCH sequences per rank and step, of CONTEXT bytes each
VOCABULARY, LAYERS, WIDTH, HEADS = 256, 4, 96, 3
LR, WARMUP, FINAL_LR = 3e-3, 0.05, 0.1  # the last two are shares: of all steps, and of LR
BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0
SENT = 2 * (RANKS - 1) / RANKS  # times a vector's bits: sent per rank by a reduce-scatter and an all-gather

SQUARES = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}  # shapes in units of WIDTH
MATRICES = {"tokens": (VOCABULARY, WIDTH), "positions": (CONTEXT, WIDTH)} | {
    f"{name}{layer}": (a * WIDTH, b * WIDTH) for layer in range(LAYERS) for name, (a, b) in SQUARES.items()
}
NORMS = [f"{name}{layer}" for layer in range(LAYERS) for name in ("attention", "mlp")] + ["final"]
SHAPES = MATRICES | {f"{norm}_{part}": (WIDTH,) for norm in NORMS for part in ("scale", "shift")}
SIZES = [math.prod(shape) for shape in MATRICES.values()]
NUMEL = sum(SIZES)  # entries of all matrices, which lie in front of the vectors
OWNED = torch.arange(RANKS)[:, None] == torch.arange(NUMEL) * RANKS // NUMEL  # [rank, entry]


def initial_model(seed: int) -> Tensor:
    """All parameters in one vector."""
    generator = Generator().manual_seed(1000 + seed)
    parts = []
    for name, shape in MATRICES.items():
        std = 0.02 / math.sqrt(2 * LAYERS) if name.startswith(("out", "down")) else 0.02
        parts.append(std * torch.randn(math.prod(shape), generator=generator))
    return torch.cat(parts + [torch.full((WIDTH,), value) for _ in NORMS for value in (1.0, 0.0)])


def losses(models: Tensor, text: Tensor) -> Tensor:
    """Mean loss per rank of the models [rank, parameter] on text [rank, sequence, CONTEXT + 1]."""
    parts = models.split([math.prod(shape) for shape in SHAPES.values()], 1)
    w = {name: part.view(RANKS, *shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}

    def normed(x: Tensor, name: str) -> Tensor:
        return torch.addcmul(w[f"{name}_shift"][:, None], F.layer_norm(x, (WIDTH,)), w[f"{name}_scale"][:, None])

    rows = text[..., :-1] + VOCABULARY * torch.arange(RANKS)[:, None, None]
    x = (F.embedding(rows, w["tokens"].reshape(-1, WIDTH)) + w["positions"][:, None]).view(RANKS, -1, WIDTH)
    for i in range(LAYERS):
        qkv = torch.bmm(normed(x, f"attention{i}"), w[f"qkv{i}"])
        q, k, v = qkv.view(-1, CONTEXT, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + torch.bmm(attended.reshape(RANKS, -1, WIDTH), w[f"out{i}"])
        x = x + torch.bmm(F.gelu(torch.bmm(normed(x, f"mlp{i}"), w[f"up{i}"])), w[f"down{i}"])
    logits = torch.bmm(normed(x, "final"), w["tokens"].transpose(1, 2)).view(-1, VOCABULARY)
    return F.cross_entropy(logits, text[..., 1:].reshape(-1), reduction="none").view(RANKS, -1).mean(1)


@cache
def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training and for validation, of the standard library's sources."""
    files = glob.glob(sysconfig.get_paths()["stdlib"] + "/**/*.py", recursive=True)
    files = sorted(file for file in files if "site-packages" not in file)
    random.Random(0).shuffle(files)
    texts = [Path(file).read_bytes() for file in files]
    held_out = len(texts) // 20
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in (texts[held_out:], texts[:held_out]))
    return train, validation


def batches(text: np.ndarray, seed: int, size: int) -> Iterator[Tensor]:
    """Batches of `size` sequences in random order, [rank, sequence, CONTEXT + 1], over and over."""
    order = np.random.RandomState(seed).permutation((len(text) - 1) // CONTEXT)
    for first in count(0, size):
        numbers = order.take(np.arange(first, first + size), mode="wrap")
        rows = text[numbers[:, None] * CONTEXT + np.arange(CONTEXT + 1)]
        yield torch.from_numpy(rows.astype(np.int64)).view(RANKS, -1, CONTEXT + 1)


class Adam:
    """Adam's moments of a tensor of any shape. The caller applies the learning rate."""

    def __init__(self, *shape: int, beta1: float = BETA1) -> None:
        self.beta1, self.steps = beta1, 0
        self.first, self.second = torch.zeros(shape), torch.zeros(shape)

    def direction(self, gradient: Tensor) -> Tensor:
        """First moment over root of the second, both with this gradient and bias corrected."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - self.beta1)
        self.second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = (self.second / (1 - BETA2**self.steps)).sqrt_().add_(EPSILON)
        return self.first / (1 - self.beta1**self.steps) / root


class Dense:
    """Adam on the mean gradient; the base of methods that approximate this mean."""

    offset = None  # ranks train the shared model

    def __init__(self, beta1: float = BETA1) -> None:
        self.adam = Adam(NUMEL, beta1=beta1)
        self.residual = torch.zeros(RANKS, NUMEL)
        self.generator = Generator().manual_seed(0)

    def step(self, gradients: Tensor, lr: float) -> tuple[Tensor, float]:
        """Return the distance to subtract from the shared matrices, and the bits sent per rank."""
        mean, bits = self._reduce(gradients)
        return lr * self.adam.direction(mean), bits

    def _reduce(self, gradients: Tensor) -> tuple[Tensor, float]:
        return gradients.mean(0), SENT * 32 * NUMEL


class OkTopk(Dense):
    """Each rank sends its largest entries, the largest sums are delivered, and the rest goes back to the senders."""

    density, samples = 0.01, 20_000  # a rank's threshold is estimated from random samples of its entries

    def _reduce(self, gradients: Tensor) -> tuple[Tensor, float]:
        self.residual += gradients
        sent = torch.stack([self._selected(row) for row in self.residual])
        total = sent.sum(0)
        delivered = total.abs() >= total.abs().topk(int(self.density * NUMEL)).values[-1]
        self.residual -= sent * delivered
        bits = sum(map(self._bits, sent)) / RANKS + self._bits(delivered)
        return total * delivered / RANKS, SENT / 2 * bits

    def _selected(self, row: Tensor) -> Tensor:
        sample = row[torch.randint(NUMEL, (self.samples,), generator=self.generator)].abs()
        return row * (row.abs() >= sample.topk(round(self.density * self.samples)).values[-1])

    @staticmethod
    def _bits(sparse: Tensor) -> float:
        p = int(sparse.count_nonzero()) / NUMEL
        return NUMEL * (32 * p - 1.1 * (p * math.log2(p) + (1 - p) * math.log2(1 - p)))


class Factors:
    """Low-rank factors of all matrices, each found by one power iteration from the last step's."""

    def __init__(self, rank: int, generator: Generator) -> None:
        starts = [torch.randn(columns, rank, generator=generator) for _, columns in MATRICES.values()]
        self.right = [torch.linalg.qr(start).Q for start in starts]
        self.bits = SENT * 16 * rank * sum(map(sum, MATRICES.values()))

    def approximation(self, mean: Tensor) -> Tensor:
        """Of this vector."""
        parts = []
        for i, (flat, shape) in enumerate(zip(mean.split(SIZES), MATRICES.values(), strict=True)):
            left = torch.linalg.qr(flat.view(shape) @ self.right[i]).Q
            right = flat.view(shape).T @ left
            parts.append((left @ right.T).view(-1))
            self.right[i] = torch.linalg.qr(right).Q
        return torch.cat(parts)


class PowerSGD(Dense):
    """Rank-4 approximation by one warm-started power iteration, with error feedback (Vogels et al., 2019)."""

    rank = 4

    def __init__(self) -> None:
        super().__init__()
        self.factors = Factors(self.rank, self.generator)

    def _reduce(self, gradients: Tensor) -> tuple[Tensor, float]:
        self.residual += gradients
        mean = self.factors.approximation(self.residual.mean(0))
        self.residual -= mean
        return mean, self.factors.bits


class SignalShare:
    """Share of a rank's squared gradient that is signal, per matrix: <g(t), g(t-1)> / <g(t), g(t)>, smoothed.

    The rest is noise, and the mean over P ranks has 1/P of its variance. The squared mean gradient is therefore about
    share + (1 - share) / P times a rank's squared gradient.
    """

    def __init__(self) -> None:
        self.previous: Tensor | None = None
        self.products, self.squares = torch.zeros(2, RANKS, len(SIZES))

    def correction(self, gradients: Tensor) -> Tensor:
        """Factor per entry from the root of a rank's second moment to that of the mean gradient."""
        share = torch.ones(len(SIZES))
        if self.previous is not None:
            for average, other in ((self.products, self.previous), (self.squares, gradients)):
                sums = [part.sum(1) for part in (gradients * other).split(SIZES, 1)]
                average.lerp_(torch.stack(sums, 1), 0.05)
            # averaged over the ranks, so that all use the same
            share = (self.products / self.squares.clamp(min=1e-30)).clamp(0, 1).mean(0)
        self.previous = gradients.clone()
        return (share + (1 - share) / RANKS).sqrt().repeat_interleave(torch.tensor(SIZES))


@dataclass
class Updates:
    """Each rank's Adam steps on its own gradient. The undelivered updates are exchanged with one bit per entry."""

    turns: int = 2  # an entry is exchanged every `turns` steps
    window: bool = False  # exchange contiguous entries instead of every `turns`-th one
    chunk: int = 0  # entries that share a step size; 0 is all entries of an exchange
    corrected: bool = True  # scale a rank's second moment to that of the mean gradient
    late: bool = False  # exchange the residual as it was before this step, as an overlapped exchange does
    local: bool = True  # a rank trains the shared model minus its residual
    local_steps: int = 1  # from exchange to exchange
    exact: bool = False  # exchange values as they are, 32 bits each

    def __post_init__(self) -> None:
        self.adam, self.signal = Adam(RANKS, NUMEL), SignalShare()
        self.residual = torch.zeros(RANKS, NUMEL)
        self.offset = self.residual if self.local else None
        self.order = cycle(range(self.turns))
        self.generator = Generator().manual_seed(0)

    def step(self, gradients: Tensor, lr: float) -> tuple[Tensor, float]:
        """See `Dense.step`."""
        update = lr * self.adam.direction(gradients)
        if self.corrected:
            update /= self.signal.correction(gradients)
        result = self._exchange() if self.late else None
        self.residual += update
        if self.adam.steps % self.local_steps:
            return torch.zeros(NUMEL), 0.0
        return result or self._exchange()

    def _exchange(self) -> tuple[Tensor, float]:
        """Senders keep the rounding errors of their entries, owners those of the sums."""
        turn, length = next(self.order), NUMEL // self.turns
        entries = slice(turn * length, (turn + 1) * length) if self.window else slice(turn, None, self.turns)
        residual, owned = self.residual[:, entries], OWNED[:, entries]
        sent = torch.where(owned, residual, self._rounded(residual))
        total = sent.sum(0, keepdim=True)
        delivered = self._rounded(total)
        residual -= sent
        residual += owned * (total - delivered)
        mean = torch.zeros(NUMEL)
        mean[entries] = delivered[0] / RANKS
        return mean, SENT * length * (32 if self.exact else 1)

    def _rounded(self, values: Tensor) -> Tensor:
        """Sign times mean magnitude."""
        if self.exact:
            return values
        chunks = values.reshape(len(values), -1, self.chunk or values.shape[1])
        return (chunks.sign() * chunks.abs().mean(2, keepdim=True)).view(values.shape)


class TopSigns(Updates):
    """Signs of the largest entries, with their indices; owners send those of the largest sums."""

    density = 0.016

    def _exchange(self) -> tuple[Tensor, float]:
        sent = torch.where(OWNED, self.residual, self._top(self.residual))
        total = sent.sum(0, keepdim=True)
        delivered = self._top(total)
        self.residual += OWNED * (total - delivered) - sent
        p = self.density
        return delivered[0] / RANKS, SENT * NUMEL * (p - 1.1 * (p * math.log2(p) + (1 - p) * math.log2(1 - p)))

    def _top(self, values: Tensor) -> Tensor:
        """Sign times the mean magnitude of those that are kept."""
        kept = values.abs() >= values.abs().topk(int(self.density * NUMEL), 1).values[:, -1:]
        step = (values.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return values.sign() * kept * step


@dataclass
class Forecast(Updates):
    """The shared model moves in every step by a forecast of the mean update; residuals hold what differs from it."""

    persistence, gain = 0.9, 0.5  # of the forecast, per step; of what an exchange says about it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forecast = torch.zeros(NUMEL)

    def _exchange(self) -> tuple[Tensor, float]:
        self.residual -= self.forecast
        mean, bits = super()._exchange()
        moved = self.forecast + mean
        self.forecast = self.persistence * self.forecast + self.gain / self.turns * mean
        return moved, bits


class LowRank(Updates):
    """Residuals by PowerSGD of rank 1."""

    rank = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.factors = Factors(self.rank, self.generator)

    def _exchange(self) -> tuple[Tensor, float]:
        mean = self.factors.approximation(self.residual.mean(0))
        self.residual -= mean
        return mean, self.factors.bits


VARIANTS: dict[str, Callable[[], Dense | Updates]] = {
    "dense": Dense,
    "dense-no-momentum": partial(Dense, beta1=0.0),
    "oktopk-adamw": OkTopk,
    "powersgd-4": PowerSGD,
    "updates-not-local": partial(Updates, local=False),
    "onebit": Updates,
    "onebit-uncorrected": partial(Updates, corrected=False),
    "onebit-window": partial(Updates, window=True),
    "onebit-chunk-steps": partial(Updates, chunk=1024),
    "onebit-late": partial(Updates, late=True),
    "onebit-quarter": partial(Updates, turns=4),
    "onebit-eighth": partial(Updates, turns=8),
    "onebit-all": partial(Updates, turns=1),
    "onebit-4-local-steps": partial(Updates, local_steps=4),
    "onebit-8-local-steps": partial(Updates, local_steps=8),
    "mean-8-local-steps": partial(Updates, turns=1, local_steps=8, exact=True),
    "onebit-eighth-forecast": partial(Forecast, turns=8),
    "updates-top-signs": TopSigns,
    "updates-low-rank": LowRank,
}


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to FINAL_LR."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return LR * (step + 1) / warmup
    return LR * (FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2)


def clipped_gradients(shared: Tensor, offset: Tensor | None, text: Tensor) -> Tensor:
    """Gradient of each rank's local model, [rank, parameter]."""
    models = shared.repeat(RANKS, 1)
    if offset is not None:
        models[:, :NUMEL] -= offset
    (gradients,) = torch.autograd.grad(losses(models.requires_grad_(), text).sum(), models)
    return gradients.mul_(min(1.0, CLIP / gradients.mean(0).norm().item()))


@torch.no_grad()
def validation_loss(shared: Tensor) -> float:
    """Mean over 512 sequences, the same for every seed."""
    models = shared.repeat(RANKS, 1)
    return sum(losses(models, text).mean().item() for text in islice(batches(corpus()[1], 7, 64), 8)) / 8


def train(name: str, steps: int, seed: int) -> dict[str, object]:
    """One variant's results. The curve has one loss every `steps // 4` steps, and ends with the validation loss."""
    shared, method, curve, bits = initial_model(seed), VARIANTS[name](), [], 0.0
    vectors = Adam(len(shared) - NUMEL, beta1=method.adam.beta1)
    for step, text in zip(range(steps), batches(corpus()[0], seed, RANKS * BATCH), strict=False):
        gradients = clipped_gradients(shared, method.offset, text)
        lr = learning_rate(step, steps)
        distance, sent = method.step(gradients[:, :NUMEL], lr)
        shared[:NUMEL].mul_(1 - lr * WEIGHT_DECAY).sub_(distance)
        shared[NUMEL:] -= lr * vectors.direction(gradients[:, NUMEL:].mean(0))
        bits += sent / steps
        if (step + 1) % max(1, steps // 4) == 0:
            curve.append(round(validation_loss(shared), 4))
    fewer = round(SENT * 32 * NUMEL / bits, 1)
    result = {"name": name, "validation_loss": curve[-1], "curve": curve, "times_fewer_bits": fewer}
    return result | {"seed": seed, "steps": steps, "parameters": len(shared)}


def main() -> None:
    """Run variants, and append one line of JSON per variant to a file or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(VARIANTS), help="Variants. Default: all.")
    parser.add_argument("--steps", type=int, default=1000, help="Training steps per variant.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for initialization and data order.")
    parser.add_argument("--out", type=Path, help="File to append JSON lines to. Default: standard output.")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in VARIANTS]:
        sys.exit(f"There is no variant {unknown[0]!r}: choose from {', '.join(VARIANTS)}.")
    if options.steps < 1:
        sys.exit(f"--steps is {options.steps}, but must be at least 1.")
    torch.set_num_threads(1)
    for number, name in enumerate(options.only, 1):
        start = time.perf_counter()
        result = train(name, options.steps, options.seed)
        took = f"{time.perf_counter() - start:.0f} s"
        print(f"{number}/{len(options.only)} {name}: loss {result['validation_loss']}, {took}", file=sys.stderr)
        with options.out.open("a") if options.out else open(1, "w", closefd=False) as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
