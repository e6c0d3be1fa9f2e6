"""Tests of worker nodes before `start`, in a generation, and after `close`."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradwire as gw
from gradwire.membership.client.requests import heartbeat, register
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.types import Member, News
from support import tls_files
from support.captured_log import CapturedLog
from support.coordinators import captured_fixture as captured_fixture
from support.coordinators import serve_fixture as serve_fixture
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]
Make = Callable[..., gw.WorkerNode]


@pytest.fixture
def make() -> Iterator[Make]:
    """Creates worker nodes, and closes them after the test."""
    made: list[gw.WorkerNode] = []

    def new(coordinator: Coordinator, name: str | None = None, **options: Any) -> gw.WorkerNode:
        made.append(gw.WorkerNode(coordinator.address, name, **{"secret": SECRET, "timeout": 30.0, **options}))
        return made[-1]

    yield new
    for node in made:
        node.close()


def together(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_worker_node_start_and_close_join_and_leave_the_job(serve: Serve, make: Make) -> None:
    coordinator = serve(2)
    nodes = [make(coordinator, f"w{n}", rank=n, size=2, endpoint=f"10.0.0.{n}:1") for n in range(2)]
    assert [(node.rank, node.size, node.generation, node.peers) for node in nodes] == [(-1, 0, 0, ())] * 2
    assert not nodes[0].healthy()
    together(*(node.start for node in nodes))
    assert [(node.rank, node.size, node.generation) for node in nodes] == [(0, 2, 1), (1, 2, 1)]
    assert [(peer.id, peer.address) for peer in nodes[1].peers] == [("w0", "10.0.0.0:1"), ("w1", "10.0.0.1:1")]
    assert all(node.healthy(30) for node in nodes)
    nodes[0].close()
    nodes[0].close()
    assert (nodes[0].rank, nodes[0].size, nodes[0].healthy()) == (-1, 0, False)


def test_worker_node_starts_only_once(serve: Serve, make: Make) -> None:
    node = make(serve(1))
    with node:
        assert (node.rank, node.size) == (0, 1)
        with pytest.raises(gw.ConfigError, match="has already been started"):
            node.start()
        assert node.rank == 0
    with pytest.raises(gw.Closed, match="is closed"):
        node.start()
    with pytest.raises(gw.Closed):
        node.start_checkpoint(1)


def test_worker_node_start_that_failed_may_be_tried_again(serve: Serve, make: Make) -> None:
    coordinator = serve(1)
    node = make(coordinator, rank=3, size=1)
    for _ in range(2):
        with pytest.raises(gw.Refused, match="rank 3 is out of range"):
            node.start()
    assert (node.rank, node.size) == (-1, 0)


def test_worker_node_before_its_start_refuses_calls(serve: Serve, make: Make) -> None:
    node = make(serve(1))
    for call in (node.rejoin, lambda: node.start_checkpoint(1), lambda: node.end_checkpoint(1)):
        with pytest.raises(gw.ConfigError, match="was not started"):
            call()


def test_worker_node_keeps_its_lease_and_follows_generations(serve: Serve, make: Make) -> None:
    coordinator = serve(2, minimum=1, maximum=2)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    node, other = make(coordinator, "node", on_news=told.put), make(coordinator, "other")
    together(node.start, other.start)
    other.close()
    node.rejoin()
    assert (node.rank, node.size, node.generation) == (0, 1, 2)
    while told.get(timeout=30).generation != 2:
        pass
    assert node.healthy(30)


def test_worker_node_of_a_static_job_is_told_that_a_silent_member_was_removed(
    serve: Serve, make: Make, captured: CapturedLog
) -> None:
    coordinator = serve(2, lease=1.0)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    node = make(coordinator, "node", on_news=told.put)
    silent = Member("silent", None, "machine", "host", os.getpid(), "")
    together(
        node.start,
        lambda: register(coordinator.address, silent, size=2, secret=SECRET, job=None, timeout=30.0),
    )
    while told.get(timeout=30).evicted != ("silent",):
        pass
    captured.wait_for("removed silent from generation 1: it died, sent no heartbeat or was unreachable")
    assert node.healthy(30)
    assert told.get(timeout=30).size == 1, "the node renews its own lease four times in that second"


def test_worker_node_that_was_evicted_is_not_healthy(serve: Serve, make: Make) -> None:
    coordinator = serve(1, minimum=1, maximum=1)
    node = make(coordinator, "node").start()
    heartbeat(coordinator.address, [], gone=["node"], secret=SECRET)
    while node.healthy(30):
        pass  # wait for its next heartbeat
    assert node.news is not None
    assert node.news.evicted == ("node",)


def test_worker_node_without_its_coordinator_is_not_healthy_and_closes_at_once(serve: Serve, make: Make) -> None:
    coordinator = serve(1)
    node = make(coordinator).start()
    coordinator.stop()
    assert not node.healthy()
    assert node.rank == 0
    node.close()


def test_worker_node_writes_checkpoints(serve: Serve, make: Make) -> None:
    coordinator = serve(2, minimum=1, maximum=2)
    nodes = [make(coordinator, name) for name in ("a", "b")]
    together(*(node.start for node in nodes))
    assert nodes[0].start_checkpoint(3).waiting_for
    assert not nodes[0].end_checkpoint(3).complete
    with pytest.raises(gw.Timeout, match=r"epoch 3 was not complete within 0\.1 s: b did not report"):
        nodes[0].end_checkpoint(3, timeout=0.1)
    together(lambda: nodes[0].end_checkpoint(3, timeout=30), lambda: nodes[1].end_checkpoint(3, timeout=30))
    assert nodes[0].start_checkpoint(3).complete


def test_worker_node_with_certificates_joins(serve: Serve, make: Make) -> None:
    coordinator = serve(1, credentials=tls_files.credentials("m0"))
    node = make(coordinator, "m1", tls=tls_files.credentials("m1")).start()
    assert node.healthy(30)


def test_worker_node_with_something_else_as_certificates_raises() -> None:
    with pytest.raises(gw.ConfigError, match=r"the argument tls is 'ca.pem': pass gw.Credentials"):
        gw.WorkerNode("127.0.0.1:1", secret=SECRET, tls="ca.pem")  # type: ignore[arg-type]


def test_worker_node_beyond_this_machine_needs_insecure_or_certificates() -> None:
    with pytest.raises(gw.ConfigError, match="is not a loopback address, and the connection would not be encrypted"):
        gw.WorkerNode("192.0.2.1:1", secret=SECRET)
    assert gw.WorkerNode("192.0.2.1:1", secret=SECRET, insecure=True).rank == -1


def test_worker_node_in_forked_child_does_not_end_the_parents_membership(serve: Serve, make: Make) -> None:
    coordinator = serve(1, minimum=1, maximum=1)
    node = make(coordinator, "node").start()
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            node.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert node.healthy(30)
    assert heartbeat(coordinator.address, [], secret=SECRET).evicted == ()
