"""Provide the pytest fixture `gradwire_ranks`: it runs a training loop on several ranks and injects faults.

    def test_my_loop(gradwire_ranks):
        run = gradwire_ranks(train, 4, faults=[gradwire_ranks.die(2, call=5)])
        assert run.died == (2,)
        assert all(isinstance(run.errors[rank], gradwire.PeerLost) for rank in (0, 1, 3))

The ranks are threads of the test's process, with groups as `gw.local_group` returns them. They need no processes and no
ports, and they raise the same errors and recover in the same way as a real job. A fault happens at a given call of a
rank: each collective counts as one call, from 1, also in subgroups, streams and later generations. With `seed=` the
faults are drawn at random, and the same seed draws the same faults. pytest finds the fixture wherever gradwire is
installed.
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

LAST_CALL = 12  # the last call at which a drawn fault can happen
LONGEST_SECONDS = 0.2  # the longest delay of a drawn fault


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one rank at one of its calls: the rank dies, raises `RuntimeError`, or makes the call later.

    `gradwire_ranks.die`, `gradwire_ranks.fail` and `gradwire_ranks.slow` create faults.
    """

    kind: Literal["die", "fail", "slow"]
    rank: int
    call: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.call < 1 or self.seconds < 0:
            raise ConfigError(f"{self}: ranks count from 0, calls from 1")

    def __str__(self) -> str:
        duration = f" for {self.seconds:g} s" if self.kind == "slow" else ""
        return f"{self.kind} rank {self.rank} at call {self.call}{duration}"


class Died(BaseException):
    """Ends the thread of a rank that dies. It is no `Exception`, so that a program that catches errors ends too."""


@dataclass(frozen=True)
class Run:
    """The result of each rank. Every rank is in exactly one of `results`, `errors` and `died`.

    - `results`: by rank, what the function returned.
    - `errors`: by rank, the exception that the function raised.
    - `died`: the ranks that a fault killed.
    - `faults`: all faults of this run, including those drawn from the seed.
    """

    results: dict[int, Any]
    errors: dict[int, BaseException]
    died: tuple[int, ...]
    faults: tuple[Fault, ...]


@dataclass
class _Rank:
    """One rank: its first group, and its faults by call."""

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
        """Return the group of the rank's current generation."""
        return self.job.current_group(GroupInternals(self.first).member_id) or self.first

    def called(self, transport: LocalTransport) -> None:
        """Count a call that begins, and apply its fault."""
        self.calls += 1
        fault = self.faults.get(self.calls)
        if fault is not None:
            self.apply(fault, transport)

    def apply(self, fault: Fault, transport: LocalTransport) -> None:
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "die":
            transport.close()  # the operating system closes the links of a dead process
            raise Died(str(fault))
        else:
            raise RuntimeError(str(fault))

    def run(self, fn: Callable[[Group], Any]) -> None:
        """Run fn as a process would: close the group at the end, or abort it if fn raises an unexpected error."""
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
    """The value of the fixture `gradwire_ranks`. Call it to run a function on several ranks."""

    def __call__(
        self,
        fn: Callable[[Group], Any],
        n: int,
        *,
        faults: Iterable[Fault] = (),
        seed: int | None = None,
        timeout: float = 30.0,
    ) -> Run:
        """Run fn(group) on each of n ranks, wait until all have ended, and return their results.

        - `faults`: the faults to inject.
        - `seed`: draw one to three more faults from this seed.
        - `timeout`: seconds after which `AssertionError` is raised. It shows the stack of each rank that still runs.
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
                raise AssertionError(_timeout_message(stuck, timeout, chosen))
        finally:
            for rank in ranks:
                rank.group.close()
        died = tuple(rank.number for rank in ranks if isinstance(rank.error, Died))
        errors = {rank.number: rank.error for rank in ranks if rank.error is not None and rank.number not in died}
        results = {rank.number: rank.result for rank in ranks if rank.error is None}
        return Run(results, errors, died, chosen)

    @staticmethod
    def die(rank: int, *, call: int) -> Fault:
        """Return a fault: the rank dies at this call, as if its process were killed. The others get `PeerLost`."""
        return Fault("die", rank, call)

    @staticmethod
    def fail(rank: int, *, call: int) -> Fault:
        """Return a fault: this call raises `RuntimeError`. If fn does not handle it, the others get `Aborted`."""
        return Fault("fail", rank, call)

    @staticmethod
    def slow(rank: int, *, call: int, seconds: float) -> Fault:
        """Return a fault: the rank makes this call some seconds later."""
        return Fault("slow", rank, call, seconds)

    @staticmethod
    def draw(seed: int, n: int) -> tuple[Fault, ...]:
        """Return the faults that a seed draws: one to three of different ranks, of which at most one is fatal.

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
    """Run fn(group) on n ranks of this process, with faults: gradwire_ranks(fn, n, faults=(), seed=None, timeout=30).

    Faults are `gradwire_ranks.die(rank, call=5)`, `gradwire_ranks.fail(rank, call=5)` and
    `gradwire_ranks.slow(rank, call=5, seconds=0.2)`. `seed=` draws faults. The result has the attributes `results`,
    `errors`, `died` and `faults`.
    """
    return Ranks()


def _timeout_message(stuck: Sequence[threading.Thread], timeout: float, faults: Sequence[Fault]) -> str:
    frames = sys._current_frames()
    stacks = []
    for thread in stuck:
        frame = frames.get(thread.ident or 0)
        stacks.append(f"{thread.name} at\n" + ("".join(traceback.format_stack(frame)) if frame else "  (just ended)\n"))
    listed = "; ".join(map(str, faults)) or "none"
    return f"not done after {timeout:g} s (faults: {listed}):\n" + "\n".join(stacks)
