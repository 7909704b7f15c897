"""The laws as checks, which can be run on an algorithm of your own.

The laws of a reducer, for every number of ranks and every pattern:
1. `total` is the same on all ranks, bit for bit.
2. Nothing is lost: sum over ranks of local == total + sum over ranks of leftover, in every coordinate, exactly on
   whole numbers.
3. `total` and `leftover` are well formed: indices strictly increasing and in range, values finite.
4. With k = numel, `total` is the dense sum and `leftover` is zero.
5. Bytes and messages received stay within `cost`.
6. The same input gives the same output.
7. Inputs are not changed.
8. The state survives pickling between steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve.comm import FRAME_BYTES, Comm, CountingComm, Traffic
from gradsieve.errors import GradsieveError
from gradsieve.feedback import Feedback
from gradsieve.reducers import Reducer
from gradsieve.selectors import Selector
from gradsieve.testing.patterns import PATTERNS, SIZES, VECTORS, Case
from gradsieve.testing.ranks import run_ranks
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces
from gradsieve.wire import OVERHEAD_BYTES

PADDING_BYTES = 24  # indices, values and note of a message each fill whole words
STEPS = 3  # the second and third step reuse the state of the first
NUMEL = 300


class LawError(GradsieveError, AssertionError):
    """An algorithm breaks a law. The message says which law, and for which input.

    Example:
        >>> from gradsieve.feedback import NoFeedback
        >>> from gradsieve.testing import LawError, check_feedback
        >>> try:
        ...     check_feedback(NoFeedback)
        ... except LawError as error:
        ...     print(error)
        vectors() must have a 'residual': undelivered entries would be lost
    """


class Outcome(NamedTuple):
    """The result of one step on one rank."""

    sent: Tensor  # the dense form of `local`, before the step
    local: SparseVector
    total: SparseVector
    leftover: SparseVector
    traffic: Traffic


def check_reducer(
    make: Callable[[], Reducer[Any]], *, sizes: Iterable[int] = SIZES, patterns: Iterable[str] = tuple(PATTERNS)
) -> None:
    """Check that a reducer obeys the laws.

    Args:
        make: Returns the reducer. Its class will do if all settings have defaults.
        sizes: Numbers of ranks.
        patterns: Names in `gradsieve.testing.patterns.PATTERNS`.

    Raises:
        LawError: A law is broken.

    Example:
        >>> from gradsieve.reducers.gtopk import GTopk
        >>> from gradsieve.testing import check_reducer
        >>> check_reducer(GTopk, sizes=[3])
    """
    names = list(patterns)
    for size in sizes:
        for name in names:
            case = PATTERNS[name](size, torch.Generator().manual_seed(size))
            try:
                steps = run_reducer(make, case)
                check_steps(make(), case, steps)
                _check_again(steps, run_reducer(make, case))
            except LawError as error:
                raise LawError(f"{size} ranks, pattern {name!r}: {error}") from None


def run_reducer(make: Callable[[], Reducer[Any]], case: Case, steps: int = STEPS) -> list[list[Outcome]]:
    """Return the outcomes by step and rank. The state is pickled and unpickled between steps."""

    def rank(comm: Comm) -> list[Outcome]:
        counting, reducer = CountingComm(comm), make()
        state = reducer.init(case.numel, counting)
        outcomes = []
        for _ in range(steps):
            counting.reset()
            local = case.local(comm.rank)
            (total, leftover), state = reducer(local, case.k, state, counting)
            state = pickle.loads(pickle.dumps(state))
            outcomes.append(Outcome(case.locals[comm.rank].clone(), local, total, leftover, counting.traffic))
        return outcomes

    by_rank = run_ranks(len(case.locals), rank)
    return [[outcomes[step] for outcomes in by_rank] for step in range(steps)]


def check_steps(reducer: Reducer[Any], case: Case, steps: list[list[Outcome]], tolerance: float = 0.0) -> None:
    """Check laws 1 to 5 for outcomes of `run_reducer`, with a tolerance if values are rounded."""
    for ranks in steps:
        check_same_everywhere(ranks)
        if reducer.conserving:
            check_nothing_lost(ranks, tolerance)
        for outcome in ranks:
            _check_well_formed("total", outcome.total)
            _check_well_formed("leftover", outcome.leftover)
        check_cost(reducer, case, ranks)
        if case.k == case.numel and not tolerance and reducer.conserving:
            _check_everything(ranks)


def equal(a: SparseVector, b: SparseVector) -> bool:
    """Compare bit for bit, including signs of zero."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[a.values.dtype]
    return torch.equal(a.indices, b.indices) and torch.equal(a.values.view(bits), b.values.view(bits))


def check_same_everywhere(ranks: list[Outcome]) -> None:
    """Law 1."""
    differing = [rank for rank, outcome in enumerate(ranks) if not equal(outcome.total, ranks[0].total)]
    if differing:
        raise LawError(f"total must be the same on all ranks, and rank {differing[0]} differs from rank 0")


def check_nothing_lost(ranks: list[Outcome], tolerance: float) -> None:
    """Law 2."""
    sent = torch.stack([outcome.sent for outcome in ranks]).sum(0)
    kept = torch.stack([outcome.leftover.to_dense() for outcome in ranks]).sum(0) + ranks[0].total.to_dense()
    wrong = ~torch.isclose(kept, sent, rtol=tolerance, atol=tolerance)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise LawError(
            f"nothing may be lost, and at index {at} the ranks sent {sent[at]:g} in sum, while total and leftovers "
            f"have {kept[at]:g} ({int(wrong.sum())} of {sent.numel()} indices differ)"
        )


def _check_well_formed(what: str, vector: SparseVector) -> None:
    """Law 3."""
    try:
        SparseVector(vector.indices, vector.values, vector.numel)
    except GradsieveError as error:
        raise LawError(f"{what} must be well formed: {error}") from error
    if not torch.isfinite(vector.values).all():
        raise LawError(f"{what} must be finite where all ranks sent finite values")


def _check_everything(ranks: list[Outcome]) -> None:
    """Law 4."""
    if not torch.equal(ranks[0].total.to_dense(), torch.stack([outcome.sent for outcome in ranks]).sum(0)):
        raise LawError("with k = numel the total must be the dense sum")
    if any(outcome.leftover.values.any() for outcome in ranks):
        raise LawError("with k = numel every leftover must be zero")


def check_cost(reducer: Reducer[Any], case: Case, ranks: list[Outcome]) -> None:
    """Law 5."""
    cost = reducer.cost(len(ranks), case.k, case.numel)
    for rank, outcome in enumerate(ranks):
        value_bytes = outcome.local.values.element_size()
        overhead = cost.packets * (OVERHEAD_BYTES + PADDING_BYTES) + cost.messages * FRAME_BYTES
        allowed = (cost.words_limit + cost.control_words) * value_bytes + overhead  # exact for float32
        traffic = outcome.traffic
        if traffic.messages_received > cost.messages:
            raise LawError(f"rank {rank} received {traffic.messages_received} messages, cost() allows {cost.messages}")
        if traffic.bytes_received > allowed:
            raise LawError(f"rank {rank} received {traffic.bytes_received} bytes, cost() allows {allowed:.0f}")


def _check_again(first: list[list[Outcome]], second: list[list[Outcome]]) -> None:
    """Laws 6 and 7."""
    for ranks, again in zip(first, second, strict=True):
        for a, b in zip(ranks, again, strict=True):
            if not (equal(a.total, b.total) and equal(a.leftover, b.leftover)):
                raise LawError("the same input must give the same output")
            if not a.local.is_full and not torch.equal(a.local.to_dense(), a.sent):
                raise LawError("the vector that a rank sends must not be changed")


def check_selector(make: Callable[[], Selector[Any]]) -> None:
    """Check that a selector obeys the laws of selectors.

    Selected entries are entries of the vector, in strictly increasing order. They are zero only if the selector goes by
    position (`selects_zeros`). If an entry is not finite, a selected one is not. The vector is not changed. The state
    survives pickling.

    Args:
        make: Returns the selector. Its class will do if all settings have defaults.

    Raises:
        LawError: A law is broken.

    Example:
        >>> from gradsieve.selectors.exact import Exact
        >>> from gradsieve.testing import check_selector
        >>> check_selector(Exact)
    """
    for name, vector in VECTORS.items():
        x = vector(torch.Generator().manual_seed(0))
        for k in sorted({1, max(1, x.numel() // 100), x.numel()}):
            try:
                _check_selected(make(), x, k)
            except LawError as error:
                raise LawError(f"vector {name!r}, k = {k}: {error}") from None
    for bad in (torch.nan, torch.inf, -torch.inf):
        _check_bad_entry(make(), bad)


def _check_selected(selector: Selector[Any], x: Tensor, k: int) -> None:
    state, before = selector.init(x.numel()), x.clone()
    for _ in range(2):
        local, state = selector(x, k, state)
        state = pickle.loads(pickle.dumps(state))
        _check_well_formed("the selection", local)
        if not torch.equal(local.values, before[local.indices]):
            raise LawError("selected values must be entries of the vector")
        if not selector.selects_zeros and not local.values.all():
            raise LawError("a zero was selected, and selects_zeros is False")
        if not torch.equal(x, before):
            raise LawError("the vector must not be changed")


def _check_bad_entry(selector: Selector[Any], bad: float) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    x[1234] = bad
    local, _ = selector(x, 10, selector.init(x.numel()))
    if torch.isfinite(local.values).all():
        raise LawError(f"an entry is {bad}, and all selected entries are finite")


def check_feedback(make: Callable[[], Feedback[Any]]) -> None:
    """Check that error feedback obeys its laws: accumulated entries are delivered or stay in the residual.

    A step does not change the state before it, so that a failed step can be undone. A withheld piece keeps its
    residual. `rescale_` multiplies all vectors of the state.

    Args:
        make: Returns the feedback. Its class will do if all settings have defaults.

    Raises:
        LawError: A law is broken.

    Example:
        >>> from gradsieve.feedback import Residual
        >>> from gradsieve.testing import check_feedback
        >>> check_feedback(Residual)
    """
    feedback, generator = make(), torch.Generator().manual_seed(0)
    state = feedback.init(Pieces([_whole_numbers(generator)]))
    for step in range(STEPS):
        withheld = [False, step == 1]
        state = _check_one_step(feedback, state, _whole_numbers(generator), withheld)
    before = {kind: vector.clone() for kind, vector in feedback.vectors(state).items()}
    feedback.rescale_(state, 0.5)
    if any(not torch.equal(vector, 0.5 * before[kind]) for kind, vector in feedback.vectors(state).items()):
        raise LawError("rescale_ must multiply all vectors of the state")


def _check_one_step(feedback: Feedback[Any], state: Any, values: Tensor, withheld: list[bool]) -> Any:
    grad = Pieces([part.clone() for part in torch.split(values, NUMEL // 2)], withheld)
    before = {kind: vector.clone() for kind, vector in feedback.vectors(state).items()}
    if "residual" not in before:
        raise LawError("vectors() must have a 'residual': undelivered entries would be lost")
    accumulated = feedback.accumulate(grad, grad, state, None, NUMEL).vector
    entire, (first, second) = accumulated.clone(), torch.split(accumulated.clone(), NUMEL // 2)
    indices = torch.arange(0, NUMEL // 2, 3)
    local = SparseVector(indices, first[indices], NUMEL)
    leftover = SparseVector(indices[::2].contiguous(), local.values[::2].contiguous(), NUMEL)
    after = feedback.settle(accumulated, grad, local, leftover, state)
    if any(not torch.equal(vector, before[kind]) for kind, vector in feedback.vectors(state).items()):
        raise LawError("a step must not change the state before it")
    expected = entire - local.to_dense() + leftover.to_dense()
    if withheld[1]:
        if second.any():
            raise LawError("a withheld piece has no part in a step: it must be accumulated as zero")
        expected[NUMEL // 2 :] = before["residual"][NUMEL // 2 :]
    if not torch.equal(feedback.vectors(after)["residual"], expected):
        raise LawError("the residual after a step must be the accumulated minus the delivered entries")
    return after


def _whole_numbers(generator: torch.Generator) -> Tensor:
    return torch.randint(-8, 9, (NUMEL,), generator=generator).double()
