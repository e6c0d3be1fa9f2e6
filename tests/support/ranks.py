"""Runs ranks as threads, which is enough for most tests of collectives, and waits for conditions."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import gradwire as gw
from gradwire.errors import GradwireError

HANG_SECONDS = 100.0  # a bound for something that takes milliseconds, on a busy machine


class Abortable(Protocol):
    def abort(self, reason: str) -> object: ...


G = TypeVar("G", bound=Abortable)
T = TypeVar("T")
Groups = TypeVar("Groups", bound=Sequence[gw.Group])


def run_ranks(groups: Sequence[G], fn: Callable[[G], T], *, timeout: float = HANG_SECONDS) -> list[T]:
    """Run fn(group) for each group in a thread of its own, and return the results in the order of the groups.

    If ranks fail, the first exception is raised here, with the others as notes. The group of a rank that fails is
    aborted, so that the other ranks do not wait for it. The error shows the stacks of ranks that are not done in time.
    """
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order in which they happened: list.append is atomic

    def run(rank: int, group: G) -> None:
        try:
            results[rank] = fn(group)
        except BaseException as error:
            failures.append((rank, error))
            with contextlib.suppress(GradwireError):
                group.abort(f"a test failed with {error!r}")

    threads = [
        threading.Thread(target=run, args=(rank, group), name=f"rank {rank}", daemon=True)
        for rank, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    if failures:
        raise _first(failures, stuck)
    if stuck:
        raise AssertionError(f"not done after {timeout:g} s:\n" + "\n".join(map(_stack, stuck)))
    return [results[rank] for rank in range(len(groups))]


def run_group(n: int, fn: Callable[[gw.Group], T]) -> list[T]:
    """Run fn(group) on n ranks of an in-process group, and close the group."""
    with closing(gw.local_group(n)) as groups:
        return run_ranks(groups, fn)


@contextlib.contextmanager
def closing(groups: Groups) -> Iterator[Groups]:
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def eventually(condition: Callable[[], bool]) -> bool:
    """Poll a condition until it is true; False if it is not after `HANG_SECONDS`."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _first(failures: Sequence[tuple[int, BaseException]], stuck: Sequence[threading.Thread]) -> BaseException:
    (rank, first), *others = failures
    first.add_note(f"raised on rank {rank}")
    for rank, error in others:
        first.add_note(f"then on rank {rank}: {type(error).__name__}: {error}")
    for thread in stuck:
        first.add_note(f"and still running: {_stack(thread)}")
    return first


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame else "  (just ended)\n"
    return f"{thread.name} at\n{where}"
