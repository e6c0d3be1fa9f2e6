"""The standard health check of a coordinator, as any client of it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from gradwire.membership.coordinator import health
from gradwire.membership.coordinator.health import MEMBERSHIP, NOT_SERVING, SERVICE_UNKNOWN, SERVING
from gradwire.membership.coordinator.service import Coordinator

Serve = Callable[..., Coordinator]


@pytest.fixture
def coordinator(serve: Serve) -> Coordinator:
    return serve(1)


@pytest.fixture
def channel(coordinator: Coordinator) -> Iterator[Any]:
    with grpc.insecure_channel(coordinator.address) as channel:
        yield channel


def check(channel: Any, service: str) -> int:
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    return int(ask(StringValue(value=service), timeout=10).value)


def watch(channel: Any, service: str) -> Any:
    ask = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    return ask(StringValue(value=service), timeout=30)


def test_check(channel: Any) -> None:
    assert [check(channel, service) for service in ("", MEMBERSHIP)] == [SERVING, SERVING]
    with pytest.raises(grpc.RpcError) as caught:
        check(channel, "something.else")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_watch_tells_of_each_change_until_the_end(coordinator: Coordinator, channel: Any) -> None:
    known, unknown = watch(channel, MEMBERSHIP), watch(channel, "something.else")
    assert (next(known).value, next(unknown).value) == (SERVING, SERVICE_UNKNOWN)
    coordinator._health.set(False)
    assert next(known).value == NOT_SERVING
    coordinator._health.set(True)
    assert next(known).value == SERVING
    coordinator.stop()
    assert [one.value for one in known] == [NOT_SERVING]
    assert list(unknown) == []


def test_watchers_that_went_away_make_room(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_WATCHERS", 1)
    first = watch(channel, "")
    next(first)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(channel, ""))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    while True:  # the coordinator hears of it on its own time
        try:
            assert next(watch(channel, "")).value == SERVING
        except grpc.RpcError:
            continue
        break


def test_the_package_that_is_made_for_it_understands_it(channel: Any) -> None:
    messages = pytest.importorskip("grpc_health.v1.health_pb2")
    stubs = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    reply = stubs.HealthStub(channel).Check(messages.HealthCheckRequest(service=MEMBERSHIP))
    assert reply.status == messages.HealthCheckResponse.SERVING
