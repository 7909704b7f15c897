"""The exchanging thread: a job that raises is told of, and later calls go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gradsieve import ExchangeError, GradsieveError
from gradsieve.engine.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.close()


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_call_raises_what_the_job_raised_and_the_thread_goes_on(worker: Worker, error: BaseException) -> None:
    with pytest.raises(type(error)):
        worker.call(lambda: fail(error))
    assert worker.call(lambda: 7) == 7


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)], ids=repr)
def test_the_error_of_a_job_that_no_one_waits_for_is_raised_at_the_next_call(
    worker: Worker, error: BaseException
) -> None:
    """It ended the thread once, without a word, and the next call waited for ever."""
    done = threading.Event()
    worker.submit(lambda: fail(error))
    worker.submit(done.set)
    assert done.wait(10)
    with pytest.raises(ExchangeError, match="failed before this call") as raised:
        worker.call(lambda: 7)
    assert raised.value.__cause__ is error
    assert worker.call(lambda: 7) == 7


def test_a_job_has_its_own_listener_for_errors(worker: Worker) -> None:
    heard: list[BaseException] = []
    worker.submit(lambda: fail(ValueError("broken")), heard.append)
    assert worker.call(lambda: 7) == 7
    assert [str(error) for error in heard] == ["broken"]


def test_a_listener_that_raises_is_raised_at_the_next_call(worker: Worker) -> None:
    worker.submit(lambda: fail(ValueError("broken")), lambda error: fail(RuntimeError("deaf")))
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(10)
    with pytest.raises(ExchangeError, match="deaf"):
        worker.submit(lambda: None)


def test_a_closed_worker_says_so(worker: Worker) -> None:
    worker.close()
    with pytest.raises(GradsieveError, match="has been closed"):
        worker.submit(lambda: None)
