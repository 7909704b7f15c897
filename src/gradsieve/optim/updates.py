"""The exchange of an optimizer's updates after its step: the entry point for loops without DDP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsieve.engine import Settings
from gradsieve.engine.rules import Rules
from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.optim.exchange import Options, agreed
from gradsieve.optim.named import Named
from gradsieve.recipes import Recipe
from gradsieve.updates import Outer, UpdateEngine, UpdateSieve, bind, for_updates
from gradsieve.updates.adapting import aware, rates
from gradsieve.updates.averaging import mean_gradients_
from gradsieve.updates.decision import UpdateDecision
from gradsieve.updates.defaults import DEFAULT_UPDATE_RECIPE
from gradsieve.updates.engine import PLAIN
from gradsieve.updates.signal import signal_fact
from gradsieve.updates.warmup import rehearse_updates


class UpdateExchange:
    """Exchanges the updates of one optimizer on one rank. All ranks make it together, since it communicates."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: Named,
        parameters: Mapping[str, Tensor],
        recipe: Recipe,
        schedule: Schedule,
        rules: Rules,
        outer: Outer,
        options: Options,
        *,
        chooses: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                "exchange='updates' needs the model itself, not its named_parameters(): its forward passes must run on "
                "the local model"
            )
        settings = for_updates(Settings(recipe, schedule, options.get("local_clip_norm")), outer)
        with torch.no_grad():
            kinds = rates(optimizer, parameters)
            chooses = chooses and outer == PLAIN  # dense gradients are exchanged at every step
            facts = {"outer": repr(outer), **signal_fact(optimizer), "automatic choice": repr(chooses)}
            groups, comm = agreed(parameters, settings, rules, options, rehearse_updates, kinds, **facts)
            self.engine = UpdateEngine(groups, settings, comm, parameters, outer)
        self.sieve = UpdateSieve(self.engine, sinks=options.get("sinks", ()))
        self.sieve.follow(parameters, optimizer)
        aware(optimizer, comm.size)
        self._decision: UpdateDecision | None = None
        if chooses and comm.size > 1:
            with torch.no_grad():
                self._decision = self.sieve.choose(DEFAULT_UPDATE_RECIPE)
        bind(model, optimizer, self.sieve.local, self.sieve.before_training)

    @torch.no_grad()
    def before_step(self) -> None:
        """Average the gradients, if these are exchanged. All ranks step together."""
        if self._decision is not None:
            self._decision.begin_step()
            if self._decision.is_dense:
                with self.engine.comm.aside() as beside:
                    mean_gradients_(self.sieve.local.parameters, beside)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the optimizer's step, and exchange its updates if that is due."""
        self.engine.count_local_step()
        if self.engine.is_due:
            self.engine.is_due = False
            self._between_steps()
            self.sieve.report()

    def _between_steps(self) -> None:
        decision, local = self._decision, self.sieve.local
        if decision is None:
            self._exchange()
            return
        if decision.is_dense:
            self.engine.count_dense_step(0.0)
        elif not decision.wants_change:
            self._exchange()
        decision.end_exposed_step()
        if decision.wants_change:
            local.take_on()
            decision.change()
        decision.record()
        if decision.chooser.is_due:
            decision.compare()

    def _exchange(self) -> None:
        self.sieve.local.take_on()
        self.engine.exchange_all()
        self.sieve.local.exchanged()
