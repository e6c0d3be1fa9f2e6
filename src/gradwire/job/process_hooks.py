"""What happens at the end of this process and after a fork; and the group of this process's job."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from types import CodeType

from gradwire.errors import ConfigError
from gradwire.generation.lifetime import Lifetime
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.liveness.call_log import place

_live: set[Lifetime] = set()
_hooked = threading.Lock()
_hooks_set = False
_current: Group | None = None  # of this process's job
_initialised_at: tuple[CodeType, int] | None = None  # the call of `gw.init` that led to that group


def keep(group: Group, initialised_at: tuple[CodeType, int] | None = None) -> Group:
    """Make this the current group of this process, in place of an earlier one, and return it."""
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
    """The group that this process is in by `init`, if it is still open."""
    return None if _current is None or GroupInternals(_current).is_closed else _current


def track(lifetime: Lifetime) -> None:
    """Close a generation at the end of this process, and abandon it in a forked child."""
    global _hooks_set
    with _hooked:
        if not _hooks_set:
            _hooks_set = True
            atexit.register(_say_goodbye)
            os.register_at_fork(after_in_child=_abandon)
    _live.add(lifetime)
    lifetime.on_close(_live.discard)


def _say_goodbye() -> None:
    """A process that ends has closed its groups; one that ends with an exception has given up, and says why."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for lifetime in list(_live):
        with contextlib.suppress(Exception):
            if error is None:
                lifetime.close()
            else:
                lifetime.give_up(error)


def _abandon() -> None:
    """A forked child must not keep its parent's connections open: peers would take a dead rank for a living one."""
    for lifetime in list(_live):
        lifetime.abandon()
    _live.clear()
