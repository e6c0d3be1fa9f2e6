"""A proxy between ranks that ends HTTP/2 on both sides, as service meshes do. It is built with gRPC's own library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gradwire.membership.grpc_import import grpc

STREAMS = 64


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards every call of any method to `target`, all of them over one connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.methods: list[str] = []
        self.messages = 0  # of the calling side
        self.largest = 0  # bytes of a message
        self._channel = grpc.insecure_channel("{}:{}".format(*target))
        self._pool = ThreadPoolExecutor(STREAMS)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers((self,))
        self.address = ("127.0.0.1", self._server.add_insecure_port("127.0.0.1:0"))
        self._server.start()

    def service(self, details: Any) -> Any:
        self.methods.append(details.method)
        return grpc.stream_stream_rpc_method_handler(self._forward(details.method))

    def _forward(self, method: str) -> Any:
        def forward(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            call = self._channel.stream_stream(method)(self._counted(requests))
            context.add_callback(call.cancel)
            with contextlib.suppress(grpc.RpcError):
                yield from call

        return forward

    def _counted(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        for message in requests:
            self.messages += 1
            self.largest = max(self.largest, len(message))
            yield message

    def close(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()
        self._pool.shutdown()
