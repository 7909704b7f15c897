"""A replica: one rank's copy of a model in training, with DDP, sieve, optimizer, sampler and random state.

Several replicas may take turns in one process. Each has its own state of the random generator, so it trains as it
would alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp import attach
from gradsieve.lab.baselines.model import BaselineModel
from gradsieve.lab.data.sampler import mixed_seed
from gradsieve.lab.network.counters import interface_counters
from gradsieve.lab.train.clock import BackwardClock
from gradsieve.lab.train.interval import PHASES, Interval
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.train.probe import Probe, probed
from gradsieve.lab.workloads import Drawn, Task, set_rate
from gradsieve.sieve import Sieve
from gradsieve.updates import UpdateSieve


class Replica:
    """All ranks create it together and call its methods together."""

    def __init__(
        self, plan: Plan, task: Task[Any], device: torch.device | str = "cpu", in_network: bool = False
    ) -> None:
        """`in_network`: this rank has its own host of a laboratory, whose interface counts the rank's bytes."""
        self.plan, self.task, self.device = plan, task, torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sampler = task.sampler(self.rank, self.size, plan.seed)
        self.steps_per_epoch = self.sampler.steps_left
        self.total_steps = plan.total_steps(self.steps_per_epoch)
        preset = plan.resolved()
        self.preset = replace(preset, epochs=self.total_steps / self.steps_per_epoch)
        choice = plan.choice
        self.schedule = choice.schedule(self.preset, self.steps_per_epoch)
        self.bare = task.model(plan.seed).to(self.device)
        self.baseline = BaselineModel(choice.ddp_baseline, self.bare, self.total_steps) if choice.ddp_baseline else None
        self.model = self.baseline.model if self.baseline else DistributedDataParallel(self.bare)
        setting = choice.optimizer(self.preset)
        self.optimizer = setting.build(self.bare)
        self._rate = replace(self.preset, optimizer=setting).rate
        can_probe = self.baseline is None and not choice.of_updates
        self.probe = Probe() if can_probe and plan.probe_every is not None else None
        self.sieve = self._attached()
        self.step = 0
        self._in_network = in_network
        self._clock = BackwardClock(self.bare)
        self._batches: Iterator[Drawn[Any]] = iter(())
        self._carry: Any = None
        self._random_state = torch.Generator().manual_seed(mixed_seed(plan.seed, self.rank)).get_state()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def advance(self, steps: int) -> Interval:
        """Train for some steps and return their sums."""
        interval = Interval()
        self.bare.train()
        before = interface_counters().bytes_received if self._in_network else None
        with self._own_random_state():
            for _ in range(steps):
                self._step(interval)
        self._exchange_last(interval)
        if before is not None:
            interval.interface_bytes = interface_counters().bytes_received - before
        return interval

    def evaluate(self) -> Mapping[str, float]:
        """The scores on the test data, equal on all ranks. Each rank computes a part."""
        # Running means of batch norm differ between ranks within a step. Training continues with those of rank 0.
        _broadcast(list(self.bare.buffers()))
        with self._common_parameters():
            sums = self.task.measure(self.bare, self.rank, self.size)
        dist.all_reduce(sums)
        return self.task.scores(sums)

    def digest(self) -> str:
        """SHA-256 of all parameters. All ranks call it together."""
        digest = hashlib.sha256()
        with self._common_parameters():
            for parameter in self.bare.parameters():
                digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def shared_state(self) -> dict[str, Any]:
        """State that is equal on all ranks."""
        return {
            "step": self.step,
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        """State of this rank alone."""
        return {
            "sieve": None if self.sieve is None else self.sieve.state_dict(),
            "chance": self._random_state,
            "carry": self._carry,
        }

    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Continue exactly from a saved state."""
        self.bare.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.sampler.load_state_dict(shared["sampler"])
        self.step = shared["step"]
        if self.sieve is not None:
            self.sieve.load_state_dict(own["sieve"])
        self._random_state, self._carry = own["chance"], own["carry"]
        self._batches = iter(())

    def close(self) -> None:
        """End the sieve's thread and process group. All ranks call it together."""
        self._clock.close()
        if self.sieve is not None:
            dist.barrier()
            self.sieve.close()

    def _common_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters are equal on all ranks. Those of a baseline may differ otherwise."""
        return self.baseline.averaged() if self.baseline else contextlib.nullcontext()

    def _attached(self) -> Sieve | None:
        if self.baseline is not None:
            return None
        choice = self.plan.choice
        made = choice.build(self.preset)
        if self.probe is not None:
            made = probed(made, self.probe)
        updates = choice.of_updates
        return attach(
            self.model,
            made,
            density=self.schedule,
            optimizer=self.optimizer if updates else None,
            outer=choice.outer,
            adapt=choice.adapts,
            group_mb=choice.group_mb,
            local_clip_norm=None if updates else self._local_clip_norm(),
        )

    def _local_clip_norm(self) -> float | None:
        """Clip before a sparse exchange: what clipping removes from a mean would be in no rank's residual.

        `attach` takes the norm of the sum over ranks, presets that of the mean.
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
        if not self._count(interval, before):
            self._update()
        self.step += 1
        loss_value = loss.item()
        ended = time.perf_counter()
        computed = min(max(self._clock.last, forward), backward)
        self._note(interval, loss_value, (started, drawn, forward, computed, backward, ended))

    def _exchange_last(self, interval: Interval) -> None:
        """Exchange the last updates if they are due. The evaluation that may follow must not do it: it is not timed."""
        if not isinstance(self.sieve, UpdateSieve):
            return
        before, started = self._counts(), time.perf_counter()
        self.sieve.exchange()
        interval.phases["exchange"] += time.perf_counter() - started
        self._count(interval, before)

    def _note(self, interval: Interval, loss: float, times: tuple[float, ...]) -> None:
        interval.steps += 1
        interval.loss += loss
        for phase, start, stop in zip(PHASES, times, times[1:], strict=False):
            interval.phases[phase] += stop - start
        if self.baseline is not None:
            interval.bytes_received += self.baseline.bytes_received(self.step - 1)

    def _count(self, interval: Interval, before: tuple[int, int, int, int]) -> int:
        """Add what the sieve exchanged since then. Returns the number of steps that it skipped."""
        received, selected, delivered, skipped = (
            after - now for after, now in zip(self._counts(), before, strict=True)
        )
        interval.bytes_received += received
        interval.selected += selected
        interval.delivered += delivered
        interval.skipped += skipped
        return skipped

    def _update(self) -> None:
        limit = self.preset.clip_norm
        if limit is not None and self.sieve is None:
            torch.nn.utils.clip_grad_norm_(self.bare.parameters(), limit)
        elif limit is not None and isinstance(self.sieve, UpdateSieve):
            self.sieve.clip_grad_norm_(limit)
        self.optimizer.step()
        if self.baseline is not None:
            self.baseline.after_update()

    @property
    def progress(self) -> float:
        """Epochs done, with fractions."""
        return self.step / self.steps_per_epoch

    def rate_of(self, step: int) -> float:
        """The learning rate of a step, counted from 0. Taken at the middle of the step, so that it is never zero."""
        return self._rate((step + 0.5) / self.steps_per_epoch)

    def _counts(self) -> tuple[int, int, int, int]:
        """Totals so far: bytes received, entries selected, entries delivered, steps skipped."""
        if self.sieve is None:
            return 0, 0, 0, 0
        stats = self.sieve.stats
        return stats.traffic.bytes_received, stats.selected_entries, stats.delivered_entries, stats.skipped_steps

    def _next_batch(self) -> Drawn[Any]:
        while (batch := next(self._batches, None)) is None:
            self._batches = self.task.batches(self.sampler, self.device)
        return batch

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(outer)


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Broadcast tensors from rank 0, in one message per dtype."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, 0)
        for tensor, values in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(values.view_as(tensor))
