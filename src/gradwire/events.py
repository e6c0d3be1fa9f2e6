"""A tracing point that calls subscribers when a group's operations begin, end and fail.

The operations are those in a group's order, called directly or on a stream: collectives and exchanged values.
Point-to-point messages, links and waits emit no events. Without a subscriber an operation costs one more comparison.
With a subscriber, repeated calls cannot use the native fast path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """The beginning, end or failure of an operation: `name` is "begin", "end" or "fail".

    `facts` has the rank and the group's number. An "end" or "fail" event also has `seconds`, a "fail" event `error`.
    """

    name: str
    operation: str
    facts: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


Subscriber = Callable[[Event], None]
log = logging.getLogger("gradwire.events")

_lock = threading.Lock()
subscribers: list[Subscriber] = []  # changed by `subscribe` only; the native core checks whether this list is empty


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber` with every event from now on; return a function that ends the subscription.

    >>> seen = []
    >>> unsubscribe = subscribe(lambda event: seen.append(event.name))
    >>> with operation("all_reduce", rank=0): pass
    >>> unsubscribe()
    >>> seen
    ['begin', 'end']
    """

    def deliver(event: Event) -> None:  # unique per subscription, so that one of two equal subscribers can be removed
        subscriber(event)

    with _lock:
        subscribers.append(deliver)

    def unsubscribe() -> None:
        with _lock:
            if deliver in subscribers:
                subscribers.remove(deliver)

    return unsubscribe


def watched() -> bool:
    """Return whether there is a subscriber. The hot path checks this before it builds an event.

    >>> watched()
    False
    """
    return bool(subscribers)


def emit(name: str, operation: str, **facts: Any) -> None:
    """Call every subscriber, in the order of subscription.

    An exception of a subscriber is logged and not raised: tracing must not break the operation.

    >>> seen = []
    >>> unsubscribe = subscribe(seen.append)
    >>> emit("begin", "barrier", rank=1)
    >>> unsubscribe()
    >>> seen[0].operation, seen[0].facts
    ('barrier', {'rank': 1})
    """
    if not subscribers:
        return
    event = Event(name, operation, facts)
    for subscriber in tuple(subscribers):
        try:
            subscriber(event)
        except Exception:
            log.exception("a subscriber raised an exception for the event %r of %s", name, operation)


@contextmanager
def operation(name: str, **facts: Any) -> Iterator[None]:
    """Emit an event when the operation begins, and another with its duration when it ends or fails.

    >>> names = []
    >>> unsubscribe = subscribe(lambda event: names.append(event.name))
    >>> try:
    ...     with operation("barrier"): raise KeyError
    ... except KeyError: unsubscribe()
    >>> names
    ['begin', 'fail']
    """
    began = time.monotonic()
    emit("begin", name, **facts)
    try:
        yield
    except BaseException as error:
        emit("fail", name, error=error, seconds=time.monotonic() - began, **facts)
        raise
    emit("end", name, seconds=time.monotonic() - began, **facts)
