"""Runs protocols that are written as generators.

Such a protocol yields requests and receives the results, and does no I/O itself. Processes and threads perform the
requests with sockets and real time. The simulator performs the requests of the same protocol in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


def drive(protocol: Generator[Request, Answer, Result], perform: Callable[[Request], Answer]) -> Result:
    """Run a protocol to its end and return its result.

    If `perform` raises an error, the error is raised inside the protocol, at the `yield` of that request.

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
