"""One rank's copy of a model under training: DDP, a sieve, an optimizer, samples, and its own chance.

Several replicas may take turns in one process: each has its own state of the random generator, so that whatever the
others do, it trains as if alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp import attach
from gradsieve.lab.data.sampler import mixed_seed
from gradsieve.lab.network.counters import interface_counters
from gradsieve.lab.train.peer import PeerAtWork
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.train.probe import Probe, probed
from gradsieve.lab.workloads import Drawn, Task, set_rate
from gradsieve.sieve import Sieve
from gradsieve.updates import UpdateSieve

PHASES = ("data", "forward", "backward", "exchange", "update")
"""Of a step. `exchange` is what is still waited for when the last gradient is there; the rest hides behind backward."""


@dataclass
class Interval:
    """Sums over some steps of one rank."""

    steps: int = 0
    loss: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds
    bytes_received: int = 0  # payload; of an all_reduce and of torch's hooks computed, not counted
    interface_bytes: int | None = None  # received by this rank's host, where it has one of its own
    selected: int = 0  # entries this rank picked
    delivered: int = 0  # entries all ranks got
    skipped: int = 0  # steps in which something was not finite

    @property
    def seconds(self) -> float:
        """All phases."""
        return sum(self.phases.values())


class Replica:
    """All ranks make it together, and call its methods together."""

    def __init__(
        self, plan: Plan, task: Task[Any], device: torch.device | str = "cpu", in_network: bool = False
    ) -> None:
        """`in_network`: this rank has a host of the laboratory for itself, whose interface counts its bytes."""
        self.plan, self.task, self.device = plan, task, torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sampler = task.sampler(self.rank, self.size, plan.seed)
        self.steps_per_epoch = self.sampler.steps_left
        self.total_steps = plan.total_steps(self.steps_per_epoch)
        preset = plan.resolved()
        self.preset = replace(preset, epochs=self.total_steps / self.steps_per_epoch)
        self.schedule = plan.exchange.schedule(self.preset, self.steps_per_epoch)
        self.bare = task.model(plan.seed).to(self.device)
        self.peer = PeerAtWork(plan.exchange.peer, self.bare, self.total_steps) if plan.exchange.peer else None
        self.model = self.peer.model if self.peer else DistributedDataParallel(self.bare)
        setting = plan.exchange.optimizer(self.preset)
        self.optimizer = setting.build(self.bare)
        self._rate = replace(self.preset, optimizer=setting).rate
        probed = plan.probe_every is not None and self.peer is None and not plan.exchange.of_updates
        self.probe = Probe() if probed else None
        self.sieve = self._attached()
        self.step = 0
        self._in_network = in_network
        self._clock = _BackwardClock(self.bare)
        self._batches: Iterator[Drawn[Any]] = iter(())
        self._carry: Any = None
        self._chance = torch.Generator().manual_seed(mixed_seed(plan.seed, self.rank)).get_state()

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def advance(self, steps: int) -> Interval:
        """Train for some steps."""
        interval = Interval()
        self.bare.train()
        before = interface_counters().bytes_received if self._in_network else None
        with self._own_chance():
            for _ in range(steps):
                self._step(interval)
        if before is not None:
            interval.interface_bytes = interface_counters().bytes_received - before
        return interval

    def evaluate(self) -> Mapping[str, float]:
        """The scores of the test data, shared by all ranks, the same on all."""
        # Running means differ between ranks within a step; rank 0's are the ones that training goes on with.
        _share_first(list(self.bare.buffers()))
        if isinstance(self.sieve, UpdateSieve):
            self.sieve.exchange()
        with self._common_parameters():
            sums = self.task.measure(self.bare, self.rank, self.size)
        dist.all_reduce(sums)
        return self.task.scores(sums)

    def digest(self) -> str:
        """Of all parameters, bit for bit; all ranks call it together."""
        digest = hashlib.sha256()
        with self._common_parameters():
            for parameter in self.bare.parameters():
                digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all ranks."""
        return {
            "step": self.step,
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        """What only this rank knows."""
        return {
            "sieve": None if self.sieve is None else self.sieve.state_dict(),
            "chance": self._chance,
            "carry": self._carry,
        }

    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Go on exactly from there."""
        self.bare.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.sampler.load_state_dict(shared["sampler"])
        self.step = shared["step"]
        if self.sieve is not None:
            self.sieve.load_state_dict(own["sieve"])
        self._chance, self._carry = own["chance"], own["carry"]
        self._batches = iter(())

    def close(self) -> None:
        """End its thread and process group; all ranks together."""
        self._clock.close()
        if self.sieve is not None:
            dist.barrier()
            self.sieve.close()

    def _common_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all ranks have the same ones; a peer's need not be."""
        return self.peer.averaged() if self.peer else contextlib.nullcontext()

    def _attached(self) -> Sieve | None:
        if self.peer is not None:
            return None
        made = self.plan.exchange.build(self.preset)
        if self.probe is not None:
            made = probed(made, self.probe)
        updates = self.plan.exchange.of_updates
        return attach(
            self.model,
            made,
            density=self.schedule,
            optimizer=self.optimizer if updates else None,
            outer=self.plan.exchange.outer,
            adapt=self.plan.exchange.adapts,
            group_mb=self.plan.exchange.group_mb,
            local_clip_norm=None if updates else self._local_clip_norm(),
        )

    def _local_clip_norm(self) -> float | None:
        """What is exchanged sparsely is clipped before: what is cut off a mean nobody would owe any more.

        `attach` means the length of the ranks' sum, presets that of their mean.
        """
        return None if self.preset.clip_norm is None else self.preset.clip_norm * self.size

    def _step(self, interval: Interval) -> None:
        started = time.perf_counter()
        batch = self._next_batch()
        drawn = time.perf_counter()
        set_rate(self.optimizer, self.rate_of(self.step))
        if self.probe is not None and self.plan.probe_every is not None:
            self.probe.begin(self.step, wanted=(self.step + 1) % self.plan.probe_every == 0)
        before = self._counts()
        self.optimizer.zero_grad(set_to_none=True)
        loss, self._carry = self.task.loss(self.model, batch, self._carry)
        forward = time.perf_counter()
        torch.autograd.backward(loss)
        backward = time.perf_counter()
        changes = [after - now for after, now in zip(self._counts(), before, strict=True)]
        if not changes[-1]:
            self._update()
        self.step += 1
        loss_value = loss.item()
        ended = time.perf_counter()
        computed = min(max(self._clock.last, forward), backward)
        self._note(interval, loss_value, changes, (started, drawn, forward, computed, backward, ended))

    def _note(self, interval: Interval, loss: float, changes: list[int], times: tuple[float, ...]) -> None:
        interval.steps += 1
        interval.loss += loss
        for phase, start, stop in zip(PHASES, times, times[1:], strict=False):
            interval.phases[phase] += stop - start
        interval.bytes_received += self.peer.bytes_received(self.step - 1) if self.peer else changes[0]
        interval.selected += changes[1]
        interval.delivered += changes[2]
        interval.skipped += changes[3]

    def _update(self) -> None:
        limit = self.preset.clip_norm
        if limit is not None and self.sieve is None:
            torch.nn.utils.clip_grad_norm_(self.bare.parameters(), limit)
        elif limit is not None and isinstance(self.sieve, UpdateSieve):
            self.sieve.clip_grad_norm_(limit)
        self.optimizer.step()
        if self.peer is not None:
            self.peer.after_update()

    @property
    def progress(self) -> float:
        """Epochs done."""
        return self.step / self.steps_per_epoch

    def rate_of(self, step: int) -> float:
        """The learning rate of a step, counted from 0; that of its middle, so that neither first nor last is zero."""
        return self._rate((step + 0.5) / self.steps_per_epoch)

    def _counts(self) -> tuple[int, int, int, int]:
        """Bytes received, entries selected and delivered, steps skipped, so far."""
        if self.sieve is None:
            return 0, 0, 0, 0
        stats = self.sieve.stats
        return stats.traffic.bytes_received, stats.selected_entries, stats.delivered_entries, stats.skipped_steps

    def _next_batch(self) -> Drawn[Any]:
        while (batch := next(self._batches, None)) is None:
            self._batches = self.task.batches(self.sampler, self.device)
        return batch

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self._chance)
        try:
            yield
        finally:
            self._chance = torch.get_rng_state()
            torch.set_rng_state(outer)


class _BackwardClock:
    """Knows when the last gradient was computed: what backward takes after that is waiting for the exchange."""

    def __init__(self, model: nn.Module) -> None:
        self.last = 0.0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handles = [_hooked(parameter, self._look) for parameter in trained]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, parameter: Tensor) -> None:
        self.last = time.perf_counter()


def _hooked(parameter: Any, look: Callable[[Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(look)


def _share_first(tensors: Sequence[Tensor]) -> None:
    """Give all ranks what rank 0 has, in one message for each type."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, 0)
        for tensor, values in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(values.view_as(tensor))
