"""The standard health check `grpc.health.v1` of a coordinator.

Its two messages have one field each, and look on the wire exactly like protobuf's own wrappers of a string and of a
number. So no further package is needed, and none is in the way of the one that an application may use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from gradwire.membership.grpc_import import grpc

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
MEMBERSHIP = "gradwire.membership.v1.Membership"
_NAME = "grpc.health.v1.Health"
_KNOWN = ("", MEMBERSHIP)  # "" is the server as a whole


class Health:
    """Answers `Check` and `Watch`; who asks needs no secret, and learns nothing but whether the coordinator serves.

    A connection on which nothing proves the secret is closed after some seconds, so those who watch ask anew.
    """

    def __init__(self, most_watchers: int = 16) -> None:
        """Each watcher holds a thread of the server; beyond `most_watchers` they are refused."""
        self._most_watchers = most_watchers
        self._status = NOT_SERVING
        self._changed = threading.Condition()
        self._watchers = 0
        self._over = False

    def set(self, serving: bool) -> None:
        with self._changed:
            self._status = SERVING if serving else NOT_SERVING
            self._changed.notify_all()

    def close(self) -> None:
        """Those who watch are told, and let go."""
        self.set(False)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def handler(self) -> Any:
        """For `server.add_generic_rpc_handlers`."""
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
        if request.value not in _KNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return Int32Value(value=self._status)

    def _watch(self, request: StringValue, context: Any) -> Iterator[Int32Value]:
        with self._changed:
            if self._watchers >= self._most_watchers:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most_watchers} others watch already")
            self._watchers += 1
        try:
            yield from self._statuses(request.value in _KNOWN, context)
        finally:
            with self._changed:
                self._watchers -= 1

    def _statuses(self, known: bool, context: Any) -> Iterator[Int32Value]:
        if not context.add_callback(self._wake):
            return
        told = 0
        while True:
            with self._changed:
                while not self._over and context.is_active() and self._present(known) == told:
                    self._changed.wait()
                status = self._present(known)
                if not context.is_active() or status == told:
                    return
            told = status
            yield Int32Value(value=status)

    def _present(self, known: bool) -> int:
        return self._status if known else SERVICE_UNKNOWN

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
