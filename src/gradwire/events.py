"""A tracing point: subscribers are called when a group's operations begin, end and fail.

Announced is what runs in a group's order in this process, called directly or on a stream: collectives and exchanged
values. Point-to-point messages, links and waits are not. Without a subscriber an operation costs one comparison more;
with one, repeated calls no longer skip the Python code around the exchange.
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
    """Something that happened to an operation: `name` is "begin", "end" or "fail".

    `facts` are the rank and the group's number, and after the beginning `seconds`, and `error` if it failed.
    """

    name: str
    operation: str
    facts: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


Subscriber = Callable[[Event], None]
log = logging.getLogger("gradwire.events")

_lock = threading.Lock()
subscribers: list[Subscriber] = []  # for `subscribe`; the native core checks whether this list is empty


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber` with every event from now on; returns the function that ends it.

    >>> seen = []
    >>> unsubscribe = subscribe(lambda event: seen.append(event.name))
    >>> with operation("all_reduce", rank=0): pass
    >>> unsubscribe()
    >>> seen
    ['begin', 'end']
    """

    def tell(event: Event) -> None:  # one of its own, so that who subscribes twice can end one of the two
        subscriber(event)

    with _lock:
        subscribers.append(tell)

    def unsubscribe() -> None:
        with _lock:
            if tell in subscribers:
                subscribers.remove(tell)

    return unsubscribe


def watched() -> bool:
    """Whether anybody listens: the hot path asks before it builds an event.

    >>> watched()
    False
    """
    return bool(subscribers)


def emit(name: str, operation: str, **facts: Any) -> None:
    """Tell every subscriber, in the order they came. One that fails is logged: watching must not break what it watches.

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
            log.exception("a subscriber failed to take the event %r of %s", name, operation)


@contextmanager
def operation(name: str, **facts: Any) -> Iterator[None]:
    """Announce the beginning of an operation, and its end or failure with the seconds it took.

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
