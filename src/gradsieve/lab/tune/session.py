"""One tuning on all ranks of one world: measure, predict, recommend, check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsieve.comm import CountingComm, TorchComm
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS
from gradsieve.lab.tune.calibrate import measured_model
from gradsieve.lab.tune.check import CHECKED, Checked, check
from gradsieve.lab.tune.job import Job, model_job, model_work, stand_in_job
from gradsieve.lab.tune.method import GRADIENT_DENSITIES, Method, baselines
from gradsieve.lab.tune.physical import Physical, measure_physical
from gradsieve.lab.tune.plan import TunePlan
from gradsieve.lab.tune.predict import Model
from gradsieve.lab.tune.recommend import Recommendation, recommend
from gradsieve.lab.tune.together import agreed, decided

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuning:
    """The result, the same on all ranks."""

    network: str
    size: int
    job: Job
    methods: list[Method]  # of this library
    physical: Physical
    model: Model
    recommendation: Recommendation
    checked: list[Checked]

    @property
    def ranked(self) -> list[Method]:
        """All methods, dense and torch's hooks among them, the fastest first."""
        return sorted([*self.methods, *baselines()], key=self.seconds)

    def seconds(self, method: Method) -> float:
        """The predicted time per step."""
        return self.model.step_seconds(method, self.job)

    def to_json(self) -> dict[str, Any]:
        from gradsieve.lab.tune.report import to_json

        return to_json(self)


def tune_rank(rank: int, plan: TunePlan, network: str, tell: Tell) -> Tuning:
    """This rank's part; all ranks of the process group call it together."""
    job = _job(plan)
    comm = CountingComm(TorchComm(timeout_seconds=TIMEOUT_SECONDS))
    measured = measure_physical(comm, tell)
    physical = decided(lambda: measured)
    methods = plan.methods
    fitted = measured_model(comm, physical, job, methods, plan.densities or GRADIENT_DENSITIES, tell)
    model = decided(lambda: fitted)
    recommendation = recommend(model, job, methods)
    tuning = Tuning(network, comm.size, job, methods, physical, model, recommendation, [])
    if not plan.check:
        return tuning
    best = decided(lambda: [method for method in tuning.ranked if method.can_be_checked][:CHECKED])
    checked = check(model, job, best, plan.model, rank, tell)
    return Tuning(network, comm.size, job, methods, physical, model, recommendation, checked)


def _job(plan: TunePlan) -> Job:
    name = plan.model
    if name is None:
        return stand_in_job(plan.numel, plan.compute_seconds or 0.0)
    work = agreed(lambda: model_work(name))
    timed = agreed(lambda: model_job(work, name))
    return decided(lambda: timed)
