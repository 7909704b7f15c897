"""What the usual mistakes in a hand-written top-k hook cost, on scikit-learn's digits.

python benchmarks/own_hook.py > benchmarks/results/own-hook.json

The hooks here are written as people write them, each with one mistake. Bytes are counted where they are handed over: a
dense all_reduce at what a ring sends, 2n(P-1)/P words; gathered objects at their pickled size, to P-1 peers;
gradsieve's by its own counter. No `from __future__ import annotations` here: DDP reads a hook's annotations.
"""

import argparse
import json
import pickle
import statistics
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes

RANKS = 4
STEPS = 300
BATCH_SIZE = 16
DENSITY = 0.01
BUCKET_MB = 0.1  # small, as the model is: so there are several, as in a real one
SEEDS = (0, 1, 2)


@dataclass
class Hook:
    """A hand-written hook's state, and which mistake it makes."""

    names: dict[Tensor, str]
    transport: str = "masked all_reduce"  # or "all_gather_object"
    divides: bool = True
    feedback: str = "by parameter"  # or "by bucket index", "none"
    residuals: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)  # what each residual was made of
    bytes_sent: int = 0
    owed: float = 0.0  # all that was left over so far, when buckets changed
    misplaced: float = 0.0  # of that, what was dropped or given to other parameters


def own_topk(hook: Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls."""
    buffer, size = bucket.buffer(), dist.get_world_size()
    accumulated = buffer + owed_to(hook, bucket)
    chosen = accumulated.abs().topk(max(1, int(DENSITY * accumulated.numel()))).indices
    sent = torch.zeros_like(accumulated)
    sent[chosen] = accumulated[chosen]
    keep(hook, bucket, accumulated - sent)
    if hook.transport == "masked all_reduce":
        total = sent.clone()
        dist.all_reduce(total)
        hook.bytes_sent += 2 * total.numel() * total.element_size() * (size - 1) // size
    else:
        mine = (chosen, accumulated[chosen])
        gathered: list[tuple[Tensor, Tensor]] = [mine] * size
        dist.all_gather_object(gathered, mine)
        hook.bytes_sent += len(pickle.dumps(mine)) * (size - 1)
        total = torch.zeros_like(accumulated)
        for indices, values in gathered:
            total[indices] += values
    buffer.copy_(total / size if hook.divides else total)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def owed_to(hook: Hook, bucket: dist.GradBucket) -> Tensor:
    """What is left over from earlier steps, laid out as this bucket."""
    buffer = bucket.buffer()
    if hook.feedback == "none":
        return torch.zeros_like(buffer)
    names = [hook.names[parameter] for parameter in bucket.parameters()]
    if hook.feedback == "by parameter":
        parts = [hook.residuals.get(name) for name in names]
        grads = bucket.gradients()
        return torch.cat([torch.zeros(g.numel()) if p is None else p for p, g in zip(parts, grads, strict=True)])
    key = str(bucket.index())
    residual = hook.residuals.get(key)
    if residual is None:
        return torch.zeros_like(buffer)
    if hook.owners[key] != names:
        hook.owed = hook.owed or sum(each.abs().sum().item() for each in hook.residuals.values())
        hook.misplaced += residual.abs().sum().item()
        if residual.numel() == buffer.numel():
            return residual
        return torch.zeros_like(buffer)  # the usual repair of the error that sizes do not match
    return residual


def keep(hook: Hook, bucket: dist.GradBucket, residual: Tensor) -> None:
    """Remember what was not sent."""
    names = [hook.names[parameter] for parameter in bucket.parameters()]
    if hook.feedback == "by bucket index":
        hook.residuals[str(bucket.index())] = residual
        hook.owners[str(bucket.index())] = names
    elif hook.feedback == "by parameter":
        sizes = [grad.numel() for grad in bucket.gradients()]
        hook.residuals.update(zip(names, residual.split(sizes), strict=True))


VARIANTS: dict[str, dict[str, object] | str | None] = {
    "dense DDP": None,
    "masked tensor in a dense all_reduce": {},
    "all_gather_object": {"transport": "all_gather_object"},
    "no division by world size": {"divides": False},
    "residuals keyed by bucket index": {"feedback": "by bucket index"},
    "no error feedback": {"feedback": "none"},
    "gradsieve topka": "topka",
    "gradsieve oktopk": "oktopk",
}


def train(process: RankProcess, seed: int, variant: str, lr: float) -> dict[str, float]:
    """One run; all ranks together."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(99))
    train_rows, test_rows = order[:1400], order[1400:]
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(inner, bucket_cap_mb=BUCKET_MB)
    settings = VARIANTS[variant]
    hook = Hook({p: n for n, p in inner.named_parameters()}, **settings) if isinstance(settings, dict) else None
    sieve = gradsieve.attach(model, settings, density=DENSITY) if isinstance(settings, str) else None
    if hook is not None:
        model.register_comm_hook(hook, own_topk)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed * 100 + process.rank)
    for _ in range(STEPS):
        rows = train_rows[torch.randint(len(train_rows), (BATCH_SIZE,), generator=generator)]
        optimizer.zero_grad()
        cross_entropy(model(pixels[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        train_loss = cross_entropy(inner(pixels[train_rows]), labels[train_rows]).item()
        right = (inner(pixels[test_rows]).argmax(1) == labels[test_rows]).float().mean().item()
    numel = sum(parameter.numel() for parameter in inner.parameters())
    sent = 2 * numel * 4 * (process.size - 1) / process.size * STEPS
    sent = hook.bytes_sent if hook else sieve.stats.traffic.bytes_sent if sieve else sent
    misplaced = hook.misplaced / hook.owed if hook and hook.owed else 0.0
    if sieve is not None:
        sieve.close()
    return {
        "train_loss": train_loss,
        "test_accuracy": right,
        "bytes_sent_a_step": sent / STEPS,
        "misplaced_at_rebuild": misplaced,
    }


def work(process: RankProcess, lr: float) -> dict[str, list[dict[str, float]]]:
    """All runs of one rank."""
    warnings.simplefilter("ignore", FutureWarning)
    return {variant: [train(process, seed, variant, lr) for seed in SEEDS] for variant in VARIANTS}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.1)
    lr = parser.parse_args().lr
    runs = run_rank_processes(RANKS, work, lr)[0]
    rows = []
    for variant, results in runs.items():
        row: dict[str, object] = {"variant": variant}
        for key in results[0]:
            values = [result[key] for result in results]
            row[key] = statistics.mean(values)
            row[f"{key}_all"] = values
        rows.append(row)
    settings = {
        "ranks": RANKS,
        "steps": STEPS,
        "density": DENSITY,
        "batch_a_rank": BATCH_SIZE,
        "lr": lr,
        "seeds": SEEDS,
    }
    print(json.dumps({"settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
