"""File operations in a thread: one at a time, cancelled, failed."""

from __future__ import annotations

import threading

import pytest

import gradwire as gw
from gradwire.training.checkpoints.background import BackgroundJob, IsCancelled

LONG = 60.0


def test_background_job_runs_in_another_thread_and_reports_success() -> None:
    job, threads = BackgroundJob(), list[threading.Thread]()
    job.start(lambda cancelled: threads.append(threading.current_thread()), lambda: threads.append(threads[0]))
    job.wait(LONG)
    assert (job.running, job.failure, len(threads)) == (False, "", 2)
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("error", "text"),
    [(gw.CheckpointError("cannot write x"), "cannot write x"), (MemoryError("full"), "MemoryError: full")],
)
def test_background_job_that_fails_keeps_the_reason_and_does_not_report_success(error: Exception, text: str) -> None:
    job, done = BackgroundJob(), list[None]()

    def fail(cancelled: IsCancelled) -> None:
        raise error

    job.start(fail, lambda: done.append(None))
    job.wait(LONG)
    assert (job.failure, done) == (text, [])
    job.start(lambda cancelled: None)
    job.wait(LONG)
    assert job.failure == ""


def test_background_job_cancelled_ends_without_success_or_failure() -> None:
    job, done, entered, leave = BackgroundJob(), list[None](), threading.Event(), threading.Event()

    def operation(cancelled: IsCancelled) -> None:
        entered.set()
        assert leave.wait(LONG)
        if cancelled():
            raise RuntimeError("it was cancelled")

    job.start(operation, lambda: done.append(None))
    assert entered.wait(LONG)
    job.wait(0)
    assert job.running
    job.cancel()
    leave.set()
    job.wait(LONG)
    assert (job.running, job.failure, done) == (False, "", [])


def test_background_job_without_a_free_thread_fails_instead_of_raising(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = BackgroundJob()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        job.start(lambda cancelled: None)
    assert (job.running, "can't start new thread" in job.failure) == (False, True)
    job.wait(LONG)
