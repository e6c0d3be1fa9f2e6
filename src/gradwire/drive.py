"""Protocols as generators: they yield what they need done, receive what came of it, and do no I/O of their own.

Processes and threads perform the requests with sockets and real time; the simulator performs those of the same protocol
in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


def drive(protocol: Generator[Request, Answer, Result], perform: Callable[[Request], Answer]) -> Result:
    """Run a protocol to its end, and return its result. An error of `perform` is raised where the protocol waits.

    >>> def protocol():
    ...     reply = yield "ping"
    ...     return reply.upper()
    >>> drive(protocol(), lambda request: f"{request} pong")
    'PING PONG'
    """
    try:
        request = next(protocol)
        while True:
            try:
                answer = perform(request)
            except Exception as error:
                request = protocol.throw(error)
            else:
                request = protocol.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
