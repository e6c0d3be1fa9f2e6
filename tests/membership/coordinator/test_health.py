"""Tests of a coordinator's standard health check, with a standard gRPC client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from gradwire.membership.coordinator.health import MEMBERSHIP, NOT_SERVING, SERVICE_UNKNOWN, SERVING, Health
from gradwire.membership.coordinator.service import Coordinator
from support.health_client import check, watch

Serve = Callable[..., Coordinator]


@pytest.fixture
def coordinator(serve: Serve) -> Coordinator:
    return serve(1)


@pytest.fixture
def channel(coordinator: Coordinator) -> Iterator[Any]:
    with grpc.insecure_channel(coordinator.address) as channel:
        yield channel


def test_check_known_service_is_serving_and_unknown_is_not_found(channel: Any) -> None:
    assert [check(channel, service) for service in ("", MEMBERSHIP)] == [SERVING, SERVING]
    with pytest.raises(grpc.RpcError) as caught:
        check(channel, "something.else")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_watch_of_a_coordinator_that_stops_ends_with_not_serving(coordinator: Coordinator, channel: Any) -> None:
    known, unknown = watch(channel, MEMBERSHIP), watch(channel, "something.else")
    assert (next(known).value, next(unknown).value) == (SERVING, SERVICE_UNKNOWN)
    coordinator.stop()
    assert [one.value for one in known] == [NOT_SERVING]
    assert list(unknown) == []


@contextlib.contextmanager
def answering(health: Health) -> Iterator[Any]:
    """A channel to a server that offers only the health check."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((health.handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        health.close()
        server.stop(None).wait()


def test_watch_reports_each_change() -> None:
    health = Health()
    with answering(health) as channel:
        seen = watch(channel, MEMBERSHIP)
        assert next(seen).value == NOT_SERVING
        for serving, expected in ((True, SERVING), (False, NOT_SERVING)):
            health.set(serving)
            assert next(seen).value == expected


def test_watch_beyond_the_limit_is_refused_until_a_watcher_leaves() -> None:
    with answering(Health(most_watchers=1)) as channel:
        first = watch(channel, "")
        next(first)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(channel, ""))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        while True:  # the server notices the end of the call later
            try:
                assert next(watch(channel, "")).value == NOT_SERVING
            except grpc.RpcError:
                continue
            break


def test_health_messages_match_the_grpc_health_package(channel: Any) -> None:
    messages = pytest.importorskip("grpc_health.v1.health_pb2")
    stubs = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    reply = stubs.HealthStub(channel).Check(messages.HealthCheckRequest(service=MEMBERSHIP))
    assert reply.status == messages.HealthCheckResponse.SERVING
