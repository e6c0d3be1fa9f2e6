"""Worker nodes that use a group of their generation, and that answer health checks."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import gradwire as gw
from gradwire.membership.client.requests import heartbeat
from gradwire.membership.coordinator.health import NOT_SERVING, SERVING
from gradwire.membership.coordinator.service import Coordinator
from support import tls_files
from support.captured_log import capturing
from support.coordinators import serve_fixture as serve_fixture
from support.health_client import check, watch
from support.membership_claims import SECRET
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

Serve = Callable[..., Coordinator]
Start = Callable[..., list[gw.WorkerNode]]


@pytest.fixture(name="start")
def start_fixture() -> Iterator[Start]:
    """Starts worker nodes together, one thread each, and closes them after the test."""
    made: list[gw.WorkerNode] = []

    def start(coordinator: Coordinator, count: int, **options: Any) -> list[gw.WorkerNode]:
        fixed = {"secret": SECRET, "timeout": 30.0, **options}
        nodes = [gw.WorkerNode(coordinator.address, f"m{n}", rank=n, **fixed) for n in range(count)]
        made.extend(nodes)
        each(nodes, gw.WorkerNode.start)
        return nodes

    yield start
    for node in made:
        node.close()


def each(nodes: list[gw.WorkerNode], call: Callable[[gw.WorkerNode], Any]) -> list[Any]:
    """Return the result of a call for each node, all on threads of their own."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(call, nodes))


def test_worker_node_group_reduces_over_real_links(serve: Serve, start: Start) -> None:
    nodes = start(serve(3), 3)
    sums = each(nodes, lambda node: node.group.all_reduce(np.full(1000, node.rank + 1.0)))
    assert all((one == 6.0).all() for one in sums)
    groups = [node.group for node in nodes]
    assert [(group.rank, group.size, group.generation) for group in groups] == [(n, 3, 1) for n in range(3)]
    assert nodes[0].group is nodes[0].group
    group = nodes[0].group
    each(nodes, gw.WorkerNode.close)
    with pytest.raises(gw.Closed):
        group.barrier()
    with pytest.raises(gw.Closed, match="is closed"):
        _ = nodes[0].group


def test_worker_node_group_before_start_or_with_an_endpoint_raises(serve: Serve, start: Start) -> None:
    coordinator = serve(1)
    with pytest.raises(gw.ConfigError, match="was not started"):
        _ = gw.WorkerNode(coordinator.address, secret=SECRET).group
    (node,) = start(coordinator, 1, endpoint="10.0.0.5:4711")
    assert node.peers[0].address == "10.0.0.5:4711"
    for _ in range(2):
        with pytest.raises(gw.ConfigError, match="brings its own data plane"):
            _ = node.group


def test_worker_node_whose_peer_does_not_ask_for_the_group_gets_a_timeout_each_time(serve: Serve, start: Start) -> None:
    nodes = start(serve(2), 2, timeout=1.0)
    for _ in range(2):
        with pytest.raises(gw.GradwireError):
            _ = nodes[1].group
    assert nodes[1].rank == 1, "it stays a member"


def test_worker_node_rejoin_gives_the_group_of_the_next_generation(serve: Serve, start: Start) -> None:
    nodes = start(serve(3, minimum=2, maximum=3), 3)
    each(nodes, lambda node: node.group.barrier())
    nodes[1].close()
    left = [nodes[0], nodes[2]]
    for node in left:
        with pytest.raises(gw.GradwireError):
            node.group.barrier()
    each(left, gw.WorkerNode.rejoin)
    assert [(node.rank, node.size, node.generation) for node in left] == [(0, 2, 2), (1, 2, 2)]
    assert each(left, lambda node: node.group.all_reduce(node.rank + 1)) == [3, 3]


def test_worker_node_group_with_certificates_is_encrypted(serve: Serve, start: Start) -> None:
    coordinator = serve(2, credentials=tls_files.credentials("m0"))
    options: dict[str, Any] = {"secret": SECRET, "timeout": 30.0, "transport": "tcp"}
    nodes = [gw.WorkerNode(coordinator.address, tls=tls_files.credentials(m), **options) for m in ("m0", "m1")]
    try:
        each(nodes, gw.WorkerNode.start)
        assert {node.id.partition("/")[0] for node in nodes} == {"m0", "m1"}, "a certificate covers the default id"
        assert each(nodes, lambda node: node.group.all_reduce(1)) == [2, 2]
    finally:
        each(nodes, gw.WorkerNode.close)


def adds(here: Here, address: str) -> None:
    node = gw.WorkerNode(address, timeout=30.0).start()
    here.send(rank=node.rank, sum=node.group.all_reduce(1))
    try:
        while True:
            node.group.barrier()
    except gw.PeerLost as error:
        here.send_error(error)
    node.rejoin()
    here.send(size=node.size, sum=node.group.all_reduce(1))
    node.close()


def test_worker_node_processes_continue_after_a_kill(serve: Serve, job: StartJob) -> None:
    coordinator = serve(3, minimum=2, maximum=3)
    environ: Mapping[str, str] = {"GRADWIRE_TOKEN": SECRET.decode()}
    with job(adds, 3, coordinator.address, environ=environ) as ranks:
        first = [rank.receive() for rank in ranks]
        assert [one["sum"] for one in first] == [3, 3, 3]
        ranks[0].signal(signal.SIGKILL)
        assert [rank.receive()["culprit"] for rank in ranks[1:]] == [first[0]["rank"]] * 2
        assert [rank.receive() for rank in ranks[1:]] == [{"size": 2, "sum": 2}] * 2


def test_worker_node_health_check_follows_its_membership(serve: Serve, start: Start) -> None:
    coordinator = serve(1, minimum=1, maximum=1)
    (node,) = start(coordinator, 1, health="127.0.0.1:0")
    assert node.health_address is not None
    with grpc.insecure_channel(node.health_address) as channel:
        assert check(channel) == SERVING
        statuses = watch(channel)
        assert next(statuses).value == SERVING
        heartbeat(coordinator.address, [], gone=["m0"], secret=SECRET)
        assert next(statuses).value == NOT_SERVING
        node.close()
        assert list(statuses) == []
    assert node.health_address is None


def test_worker_node_health_check_while_it_waits_is_not_serving(serve: Serve) -> None:
    coordinator = serve(2)
    nodes = [gw.WorkerNode(coordinator.address, secret=SECRET, timeout=30.0, health="127.0.0.1:0") for _ in range(2)]
    waiting = threading.Thread(target=nodes[0].start)
    waiting.start()
    while nodes[0].health_address is None:
        pass
    with grpc.insecure_channel(nodes[0].health_address) as channel:
        assert check(channel) == NOT_SERVING
        nodes[1].start()
        waiting.join()
        assert check(channel) == SERVING
    each(nodes, gw.WorkerNode.close)


def test_worker_node_health_address_that_is_in_use_or_open_to_others_is_refused(serve: Serve) -> None:
    coordinator = serve(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = f"127.0.0.1:{other.getsockname()[1]}"
        node = gw.WorkerNode(coordinator.address, secret=SECRET, health=busy)
        with pytest.raises(gw.TransportError, match=f"the health check cannot listen at {busy}"):
            node.start()
    assert (node.rank, node.health_address) == (-1, None)
    with pytest.raises(gw.ConfigError, match=r"other machines could reach the health check at 0\.0\.0\.0:0"):
        gw.WorkerNode(coordinator.address, secret=SECRET, health="0.0.0.0:0").start()
    with node:  # the port is free now
        assert node.health_address == busy


def test_worker_node_logger_receives_its_lines(serve: Serve, start: Start) -> None:
    coordinator = serve(1)
    with capturing("my.node", logging.INFO) as captured:
        start(coordinator, 1, logger=logging.getLogger("my.node"))
        coordinator.stop()
        captured.wait_for("this worker continues without its coordinator", timeout=30)


@pytest.mark.slow
def test_worker_node_closed_while_it_connects_leaves_no_group(serve: Serve, start: Start) -> None:
    nodes = start(serve(2), 2)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(lambda: nodes[1].group)
        nodes[1].close()
        nodes[0].close()
        assert isinstance(connecting.exception(60), gw.GradwireError)
    with pytest.raises(gw.Closed):
        _ = nodes[1].group


def test_worker_node_that_cannot_rejoin_has_no_group(serve: Serve, start: Start) -> None:
    (node,) = start(serve(1), 1)
    assert node.group.all_reduce(1) == 1
    with pytest.raises(gw.Refused, match="this job is static"):
        node.rejoin()
    with pytest.raises(gw.Closed, match="has closed its group"):
        _ = node.group
