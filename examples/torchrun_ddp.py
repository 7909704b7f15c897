"""Plain torchrun and DDP that survives crashes: checkpoints every few steps, and goes on from the last whole one.

torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_ddp.py --folder runs/demo
torchrun --nproc-per-node 2 --max-restarts 1 examples/torchrun_ddp.py --folder runs/crash --crash-at 17

The second kills a rank in the middle of step 17, once, and ends with the same parameters as the first. Started again
with another number of ranks, it goes on with what all ranks before it still owed.
"""

import argparse
import hashlib
import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def meet() -> None:
    """Join the group of this attempt: torchrun keeps one store for all of them, with the addresses of the dead."""
    timeout = timedelta(seconds=60)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def make_model() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and the rank say which: so a run that goes on sees what it would have seen."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(16, 64, generator=generator)
    return inputs, inputs[:, :4].sin()


class Checkpoints:
    """A folder a step: one file for what all ranks have in common, one for what each rank owes."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sieve: gradsieve.Sieve
    ) -> None:
        self.folder = folder
        self.model, self.optimizer, self.sieve = model, optimizer, sieve

    def save(self, step: int) -> None:
        """A file that has its name is whole; a folder that has all its files is a checkpoint."""
        rank, size = dist.get_rank(), dist.get_world_size()
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        _write(self.sieve.state_dict(), folder / f"rank-{rank}-of-{size}.pt")
        if rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            _write(state, folder / "common.pt")

    def resume(self) -> int:
        """Go on from the last whole checkpoint; the number of steps done comes back."""
        chosen = [self._last_whole() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen)  # all ranks must go on from the same
        folder = chosen[0]
        if folder is None:
            return 0
        common = torch.load(folder / "common.pt", weights_only=True)
        self.model.load_state_dict(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        own = folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
        # Saved by another number of ranks: what all of them owed is shared out anew.
        files = [own] if own.exists() else sorted(folder.glob("rank-*.pt"))
        states = {}
        for file in files:
            states.update(torch.load(file, weights_only=True, mmap=True))
        self.sieve.load_state_dict(states)
        return int(folder.name.removeprefix("step-"))

    def _last_whole(self) -> Path | None:
        return next((path for path in sorted(self.folder.glob("step-*"), reverse=True) if _is_whole(path)), None)


def _is_whole(folder: Path) -> bool:
    found = [re.fullmatch(r"rank-\d+-of-(\d+)\.pt", path.name) for path in folder.iterdir()]
    sizes = [int(match[1]) for match in found if match]
    return (folder / "common.pt").exists() and len(set(sizes)) == 1 and len(sizes) == sizes[0]


def _write(state: dict, path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def crash() -> None:
    """As the machine would end it: without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: argparse.Namespace) -> None:
    """One rank's work."""
    meet()
    model = DistributedDataParallel(make_model())
    sieve = gradsieve.attach(model, arguments.recipe, density=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoints = Checkpoints(arguments.folder, model.module, optimizer, sieve)
    first = checkpoints.resume()
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if dist.get_rank() == 0:
        print(f"begins at step {first}", flush=True)
    for step in range(first, arguments.steps):
        inputs, targets = batch(step)
        loss = (model(inputs) - targets).square().mean()
        if step == arguments.crash_at and first_attempt and dist.get_rank() == dist.get_world_size() - 1:
            model.module[2].weight.register_hook(lambda grad: crash())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % arguments.every == 0:
            checkpoints.save(step + 1)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"rank {dist.get_rank()}: loss {loss.item():.6f}, parameters {digest[:16]}", flush=True)
    sieve.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--recipe", default="oktopk")
    parser.add_argument("--crash-at", type=int, help="kill the last rank in this step of the first attempt")
    main(parser.parse_args())
