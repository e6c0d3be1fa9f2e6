"""What begins and ends with this process: generations are started here, say goodbye at its end, and stay the parent's
after a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

from gradwire.collectives import tuning_table
from gradwire.errors import Broken, Closed
from gradwire.generation.generation import Generation
from gradwire.group import WORLD, Group
from gradwire.group.internals import GroupInternals
from gradwire.liveness.verdict import Finding

_live: weakref.WeakSet[Generation] = weakref.WeakSet()
_hooked = threading.Lock()
_hooks_set = False
_current: Group | None = None  # of this process's job


def keep(group: Group) -> Group:
    """Remember the group of this process's job; the one of an earlier generation is forgotten."""
    global _current
    _current = group
    return group


def current() -> Group | None:
    """The group that this process is in by `init`, if it is still open."""
    return None if _current is None or GroupInternals(_current).is_closed else _current


def start(generations: Sequence[Generation], timeout: float, deadline: float) -> list[Group]:
    """Connect generations (all ranks of this process) and make their world groups."""
    groups = meet(generations, timeout, deadline)
    with _or_give_up(generations):
        for group in groups:
            GroupInternals(group).connect(deadline)
        if len(generations) == generations[0].identity.size:  # all ranks are here, and have nothing to settle
            table = tuning_table.load(os.environ)
            for generation in generations:
                generation.table = table
    return groups


def meet(generations: Sequence[Generation], timeout: float, deadline: float) -> list[Group]:
    """The first half of that: all can tell each other things, and their world groups have yet to dial."""
    _set_hooks()
    groups = []
    with _or_give_up(generations):
        for generation in generations:
            _live.add(generation)
            generation.dial(deadline)
        for generation in generations:
            generation.serve(deadline)
            members = range(generation.identity.size)
            groups.append(Group(generation, members, WORLD, timeout))
    return groups


@contextlib.contextmanager
def _or_give_up(generations: Sequence[Generation]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        for generation in generations:
            generation.close(giving_up(generation, error))
        raise


def giving_up(generation: Generation, error: BaseException) -> Finding | None:
    """What the others are told of a rank that ends with an error: nothing new if they know why."""
    if isinstance(error, (Broken, Closed)) or not generation.control.sound:
        return None
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Finding("aborted", reason[:2000], generation.identity.rank)


def _set_hooks() -> None:
    global _hooks_set
    with _hooked:
        if not _hooks_set:
            _hooks_set = True
            atexit.register(_say_goodbye)
            os.register_at_fork(after_in_child=_abandon)


def _say_goodbye() -> None:
    """A process that ends has closed its groups; one that ends with an exception has given up, and says why."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for generation in list(_live):
        with contextlib.suppress(Exception):
            generation.close(None if error is None else giving_up(generation, error))


def _abandon() -> None:
    """A forked child must not keep its parent's connections open: peers would take a dead rank for a living one."""
    for generation in list(_live):
        generation.abandon()
    _live.clear()
