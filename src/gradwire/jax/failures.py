"""Raises the errors of compiled JAX programs with their original types.

XLA turns the exception of a callback into text. So the callback stores the exception under a number, and puts that
number into the text. `typed_errors` finds the exception by its number and raises it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator

import jax

KEPT = 64  # the number of stored errors; the oldest ones are dropped
_MARK = re.compile(r"\[gradwire error (\d+)\]")

_numbers = itertools.count(1)
_lock = threading.Lock()
_raised: OrderedDict[int, BaseException] = OrderedDict()


class CallbackFailed(Exception):
    """The error that XLA sees: the text of the original error, and the number under which it is stored."""


@contextlib.contextmanager
def stored_errors() -> Iterator[None]:
    """Store the error of a callback for `typed_errors`, and raise `CallbackFailed` in its place."""
    try:
        yield
    except BaseException as error:
        number = next(_numbers)
        with _lock:
            _raised[number] = error
            while len(_raised) > KEPT:
                _raised.popitem(last=False)
        raise CallbackFailed(f"{type(error).__name__}: {error} [gradwire error {number}]") from None


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the errors of a group from compiled programs with their original types: `PeerLost`, `NotFinite` and so on.

    Without this context manager, JAX raises a `JaxRuntimeError` with the text of the error. JAX runs programs
    asynchronously, so it raises the error when the program is called or when the result is awaited. Therefore wait for
    the result inside the `with` block. `gw.jax.jit` does both.

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
        _discard_failed_program()
        raise original from error


def _original(error: BaseException) -> BaseException | None:
    mark = _MARK.search(str(error))
    with _lock:
        return _raised.get(int(mark[1])) if mark else None


def _discard_failed_program() -> None:
    """Remove the failed program from JAX's ordered effects: otherwise the next program of this thread fails too."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
        return
    # The barrier raised the error and kept the tokens of the failed program. JAX has no public call to clear them.
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()
