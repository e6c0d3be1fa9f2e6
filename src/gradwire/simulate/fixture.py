"""Faults for users' own tests: a pytest fixture that runs a function on ranks of this process, some of which fail.

    def test_my_loop(gradwire_ranks):
        run = gradwire_ranks(train, 4, faults=[gradwire_ranks.die(2, call=5)])
        assert run.died == (2,)
        assert all(isinstance(run.errors[rank], gradwire.PeerLost) for rank in (0, 1, 3))

The ranks are threads with the groups of `gw.local_group`: no processes, no ports, the same errors and recovery.
A rank's calls are counted from 1: collectives, also those of subgroups, streams and later generations. With `seed=`
faults are drawn; equal seeds draw equal faults. pytest finds the fixture by itself where gradwire is installed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import pytest

from gradwire.errors import ConfigError, GradwireError
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.job.config import DEFAULT_TIMEOUT
from gradwire.job.init import thread_job
from gradwire.job.thread_job import ThreadJob
from gradwire.transports.local import LocalTransport

LAST_CALL = 12  # the latest call at which a drawn fault happens
LONGEST_SECONDS = 0.2  # that a drawn rank is slow for


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank when it makes a call: it dies, raises `RuntimeError`, or comes late by some seconds."""

    kind: Literal["die", "fail", "slow"]
    rank: int
    call: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.call < 1 or self.seconds < 0:
            raise ConfigError(f"{self}: ranks count from 0, calls from 1")

    def __str__(self) -> str:
        late = f" for {self.seconds:g} s" if self.kind == "slow" else ""
        return f"{self.kind} rank {self.rank} at call {self.call}{late}"


class Died(BaseException):
    """Ends the thread of a rank that dies. No `Exception`, so that a program that goes on after errors ends too."""


@dataclass(frozen=True)
class Run:
    """What became of each rank: it is in exactly one of `results`, `errors` and `died`."""

    results: dict[int, Any]
    errors: dict[int, BaseException]
    died: tuple[int, ...]
    faults: tuple[Fault, ...]


@dataclass
class _Rank:
    """One rank: its first group, and the faults that still wait for it."""

    number: int
    job: ThreadJob
    first: Group
    faults: dict[int, Fault]
    calls: int = 0
    result: Any = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def start(self, fn: Callable[[Group], Any]) -> None:
        self.thread = threading.Thread(target=self.run, args=(fn,), name=f"rank {self.number}", daemon=True)
        self.thread.start()

    @property
    def group(self) -> Group:
        """The group of the present generation."""
        return self.job.current_group(GroupInternals(self.first).member_id) or self.first

    def called(self, transport: LocalTransport) -> None:
        """A call of this rank begins."""
        self.calls += 1
        fault = self.faults.get(self.calls)
        if fault is not None:
            self.suffer(fault, transport)

    def suffer(self, fault: Fault, transport: LocalTransport) -> None:
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "die":
            transport.close()  # as the system does with what a dead process had open
            raise Died(str(fault))
        else:
            raise RuntimeError(str(fault))

    def run(self, fn: Callable[[Group], Any]) -> None:
        """As a process does that runs fn and nothing else: at the end it leaves, or says why it gives up."""
        try:
            self.result = fn(self.group)
        except Died as death:
            self.error = death
            return
        except BaseException as error:
            self.error = error
            if not isinstance(error, GradwireError):
                with contextlib.suppress(GradwireError):
                    self.group.abort(f"{type(error).__name__}: {error}")
        self.group.close()


class Ranks:
    """What the fixture is: call it to run a function on some ranks."""

    def __call__(
        self,
        fn: Callable[[Group], Any],
        n: int,
        *,
        faults: Iterable[Fault] = (),
        seed: int | None = None,
        timeout: float = 30.0,
    ) -> Run:
        """Run fn(group) on each of n ranks, and return when all have ended.

        Whoever is not done in `timeout` seconds is shown with its stack, as an `AssertionError`.
        """
        chosen = tuple(faults) if seed is None else (*faults, *self.draw(seed, n))
        ranks = _ranks(n, chosen)
        try:
            for rank in ranks:
                rank.start(fn)
            deadline = time.monotonic() + timeout
            for rank in ranks:
                rank.thread.join(max(0.0, deadline - time.monotonic()))
            stuck = [rank.thread for rank in ranks if rank.thread.is_alive()]
            if stuck:
                raise AssertionError(_told(stuck, timeout, chosen))
        finally:
            for rank in ranks:
                rank.group.close()
        died = tuple(rank.number for rank in ranks if isinstance(rank.error, Died))
        errors = {rank.number: rank.error for rank in ranks if rank.error is not None and rank.number not in died}
        results = {rank.number: rank.result for rank in ranks if rank.error is None}
        return Run(results, errors, died, chosen)

    @staticmethod
    def die(rank: int, *, call: int) -> Fault:
        """The rank dies when it makes its call-th call; the others get `PeerLost`."""
        return Fault("die", rank, call)

    @staticmethod
    def fail(rank: int, *, call: int) -> Fault:
        """The rank's call raises `RuntimeError`; if its program does not handle it, the others get `Aborted`."""
        return Fault("fail", rank, call)

    @staticmethod
    def slow(rank: int, *, call: int, seconds: float) -> Fault:
        """The rank makes its call later."""
        return Fault("slow", rank, call, seconds)

    @staticmethod
    def draw(seed: int, n: int) -> tuple[Fault, ...]:
        """One to three faults, of different ranks, one of which is fatal more often than not.

        >>> for fault in Ranks.draw(5, n=4): print(fault)
        slow rank 1 at call 3 for 0.13 s
        die rank 2 at call 8
        slow rank 3 at call 4 for 0.16 s
        """
        random = Random(seed)
        ranks = random.sample(range(n), min(n, random.randint(1, 3)))
        faults = []
        for index, rank in enumerate(ranks):
            kind = random.choice(("die", "die", "fail", "slow")) if index == 0 else "slow"
            seconds = round(random.uniform(0.01, LONGEST_SECONDS), 2) if kind == "slow" else 0.0
            faults.append(Fault(kind, rank, random.randint(1, LAST_CALL), seconds))  # type: ignore[arg-type]
        return tuple(sorted(faults, key=lambda fault: fault.rank))


def _ranks(n: int, faults: Sequence[Fault]) -> list[_Rank]:
    by_member: dict[str, _Rank] = {}
    job = thread_job(DEFAULT_TIMEOUT, lambda member, transport: by_member[member].called(transport))
    for number, group in enumerate(job.begin(n)):
        own = {fault.call: fault for fault in faults if fault.rank == number}
        by_member[GroupInternals(group).member_id] = _Rank(number, job, group, own)
    return list(by_member.values())


@pytest.fixture
def gradwire_ranks() -> Ranks:
    """Run a function on some ranks of this process, with faults: gradwire_ranks(fn, n, faults=(), seed=None)."""
    return Ranks()


def _told(stuck: Sequence[threading.Thread], timeout: float, faults: Sequence[Fault]) -> str:
    frames = sys._current_frames()
    stacks = []
    for thread in stuck:
        frame = frames.get(thread.ident or 0)
        stacks.append(f"{thread.name} at\n" + ("".join(traceback.format_stack(frame)) if frame else "  (just ended)\n"))
    told = "; ".join(map(str, faults)) or "none"
    return f"not done after {timeout:g} s (faults: {told}):\n" + "\n".join(stacks)
