"""Close groups when this process exits, drop them in a forked child, and remember the group that `init` returned."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from types import CodeType

from gradwire import tracebacks
from gradwire.errors import ConfigError
from gradwire.generation.lifetime import Lifetime
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.liveness.call_log import place

_live: set[Lifetime] = set()
_hooks_lock = threading.Lock()
_hooks_set = False
_current: Group | None = None  # of this process's job
_initialised_at: tuple[CodeType, int] | None = None  # the call of `gw.init` that led to that group


def set_current(group: Group, initialised_at: tuple[CodeType, int] | None = None) -> Group:
    """Remember the group of this process's job, replace that of an earlier generation, and return it."""
    global _current, _initialised_at
    _current, _initialised_at = group, initialised_at
    return group


def check_not_initialised() -> None:
    """Raise `ConfigError` if the group of an earlier `gw.init()` is still open; the error gives that call's line."""
    if (group := current()) is not None and _initialised_at is not None:
        raise ConfigError(
            f"this process is already initialised: gw.init() was called at {place(*_initialised_at)}, and {group} is "
            "not closed. Use that group, or close it before you call gw.init() again"
        )


def current() -> Group | None:
    """Return the group of this process's job, or None if `init` was not called or the group is closed."""
    return None if _current is None or GroupInternals(_current).is_closed else _current


def track(lifetime: Lifetime) -> None:
    """Arrange that a generation is closed when this process exits, and abandoned in a forked child."""
    global _hooks_set
    with _hooks_lock:
        if not _hooks_set:
            _hooks_set = True
            atexit.register(_close_at_exit)
            tracebacks.install()
            os.register_at_fork(after_in_child=_abandon)
    _live.add(lifetime)
    lifetime.on_close(_live.discard)


def _close_at_exit() -> None:
    """Close all groups; if an uncaught exception ends this process, report it to the other ranks as the reason."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for lifetime in list(_live):
        with contextlib.suppress(Exception):
            if error is None:
                lifetime.close()
            else:
                lifetime.give_up(error)


def _abandon() -> None:
    """Drop the parent's connections in a forked child: if the child kept them open, peers would not notice the
    parent's death."""
    for lifetime in list(_live):
        lifetime.abandon()
    _live.clear()
