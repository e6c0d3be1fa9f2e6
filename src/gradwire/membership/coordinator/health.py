"""Implements the standard health check `grpc.health.v1` for a coordinator or a worker.

Its two messages have one field each. On the wire they are identical to protobuf's own wrappers of a string and an
integer. So no further package is needed, and there is no conflict with the package that an application may use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from gradwire.membership.grpc_import import grpc

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
MEMBERSHIP = "gradwire.membership.v1.Membership"
_NAME = "grpc.health.v1.Health"
_KNOWN = ("", MEMBERSHIP)  # "" is the server as a whole


class Health:
    """Answers `Check` and `Watch`. A caller needs no secret, and learns only whether the process serves.

    A coordinator closes a connection without a proof of the secret after some seconds, so its watchers must connect
    again.
    """

    def __init__(self, most_watchers: int = 16, services: Sequence[str] = _KNOWN) -> None:
        """Refuse more than `most_watchers` watchers, because each one occupies a thread of the server.

        `services` are the names that callers may ask for.
        """
        self._most_watchers = most_watchers
        self._services = tuple(services)
        self._status = NOT_SERVING
        self._changed = threading.Condition()
        self._watchers = 0
        self._closed = False

    def set(self, serving: bool) -> None:
        with self._changed:
            self._status = SERVING if serving else NOT_SERVING
            self._changed.notify_all()

    def close(self) -> None:
        """Report to watchers that the process no longer serves, and end their calls."""
        self.set(False)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def handler(self) -> Any:
        """Return the handler for `server.add_generic_rpc_handlers`."""
        serializers = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": Int32Value.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **serializers),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **serializers),
        }
        return grpc.method_handlers_generic_handler(_NAME, methods)

    def _check(self, request: StringValue, context: Any) -> Int32Value:
        if request.value not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return Int32Value(value=self._status)

    def _watch(self, request: StringValue, context: Any) -> Iterator[Int32Value]:
        with self._changed:
            if self._watchers >= self._most_watchers:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most_watchers} callers watch already")
            self._watchers += 1
        try:
            yield from self._statuses(request.value in self._services, context)
        finally:
            with self._changed:
                self._watchers -= 1

    def _statuses(self, known: bool, context: Any) -> Iterator[Int32Value]:
        if not context.add_callback(self._wake):
            return
        last_sent = 0
        while True:
            with self._changed:
                while not self._closed and context.is_active() and self._current(known) == last_sent:
                    self._changed.wait()
                status = self._current(known)
                if not context.is_active() or status == last_sent:
                    return
            last_sent = status
            yield Int32Value(value=status)

    def _current(self, known: bool) -> int:
        return self._status if known else SERVICE_UNKNOWN

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
