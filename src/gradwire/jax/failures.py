"""Carries typed errors out of compiled JAX programs, which turn them into text."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator

import jax

KEPT = 64  # errors that nobody has asked for yet
_MARK = re.compile(r"\[gradwire error (\d+)\]")

_numbers = itertools.count(1)
_lock = threading.Lock()
_raised: OrderedDict[int, BaseException] = OrderedDict()


class Carried(Exception):
    """What a compiled program is told: the text of an error, and the number under which it is kept."""


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """Around a callback: keep what is raised, for `typed_errors` to find."""
    try:
        yield
    except BaseException as error:
        number = next(_numbers)
        with _lock:
            _raised[number] = error
            while len(_raised) > KEPT:
                _raised.popitem(last=False)
        raise Carried(f"{type(error).__name__}: {error} [gradwire error {number}]") from None


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Let errors of a group out of compiled programs as what they are: `PeerLost`, `NotFinite` …

    XLA turns an exception of a callback into text, and JAX raises a `JaxRuntimeError` with it when the program is
    called or, as programs run beside Python, when somebody waits for a result: so wait inside.

    >>> import gradwire as gw, jax, jax.numpy as jnp
    >>> group = gw.init()
    >>> total = jax.jit(lambda x: gw.jax.all_reduce(group, x, op="sum"))
    >>> group.close()
    >>> try:
    ...     with gw.jax.typed_errors(): total(jnp.ones(2)).block_until_ready()
    ... except gw.Closed as error: print(error)
    the group is closed
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        original = _original(error)
        if original is None:
            raise
        _forget()
        raise original from error


def _original(error: BaseException) -> BaseException | None:
    mark = _MARK.search(str(error))
    with _lock:
        return _raised.get(int(mark[1])) if mark else None


def _forget() -> None:
    """Let nothing that comes next in this thread wait for the program that failed: JAX would fail it as well."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
        return
    # The barrier ends before it forgets where a program has failed, and JAX has no public word for it.
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()
