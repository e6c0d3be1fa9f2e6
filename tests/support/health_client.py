"""A standard gRPC client of the health check `grpc.health.v1`."""

from __future__ import annotations

from typing import Any

from google.protobuf.wrappers_pb2 import Int32Value, StringValue


def check(channel: Any, service: str = "") -> int:
    """Return the status of a service: 1 is SERVING, 2 is NOT_SERVING."""
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    return int(ask(StringValue(value=service), timeout=30).value)


def watch(channel: Any, service: str = "") -> Any:
    """Return an iterator over the statuses of a service."""
    ask = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    return ask(StringValue(value=service), timeout=30)
