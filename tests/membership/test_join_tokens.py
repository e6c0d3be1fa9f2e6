"""Tests of join tokens at a real coordinator: which are accepted, and what a holder may do."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.errors import Refused
from gradwire.membership import Assembly, Member
from gradwire.membership.client.launcher_heartbeats import Heartbeats
from gradwire.membership.client.requests import end_checkpoint, heartbeat, register, unregister
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.types import News
from gradwire.security import tokens
from gradwire.security.secret import derive
from gradwire.security.tokens import Token
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]


def token(job: str = "mine", *, uses: int = 1, age: float = 0.0) -> Token:
    """Return a token that is valid for a minute and was created `age` seconds ago."""
    return tokens.read(tokens.make(SECRET, job=job, expires_in=60, uses=uses, now=time.time() - age))


def member(name: str) -> Member:
    return Member(name, None, "machine", "host", os.getpid(), "127.0.0.1:1")


def join(coordinator: Coordinator, name: str, secret: bytes | Token, generation: int = 0) -> Assembly:
    return register(
        coordinator.address,
        member(name),
        size=None,
        secret=secret,
        job=None,
        timeout=60,
        generation=generation,
        run=coordinator.run if generation else b"",
    )


@pytest.fixture
def coordinator(serve: Serve) -> Coordinator:
    return serve(1, minimum=1, maximum=1, job="mine")


def test_join_token_admits_its_holder_and_sends_the_link_key(coordinator: Coordinator) -> None:
    invitation = token()
    assembly = join(coordinator, "guest", invitation)
    assert assembly.link_key == derive(SECRET, "links", assembly.run)
    assert heartbeat(coordinator.address, ["guest"], secret=invitation).generation == 1
    again = join(coordinator, "guest", invitation, generation=1)
    assert (again.generation, again.link_key) == (2, assembly.link_key)
    assert unregister(coordinator.address, again.members[0], secret=invitation)


def test_secret_holder_derives_the_link_key(coordinator: Coordinator) -> None:
    assert join(coordinator, "host", SECRET).link_key is None


@pytest.mark.parametrize(
    ("invitation", "said"),
    [
        (token(age=61), "its join token expired [0-9]+ s ago"),
        (token("other"), "its join token is for job other, and this is job mine"),
        (Token(token().ticket, bytes(32)), "does not hold this job's secret"),
        (Token(bytes(257), bytes(32)), "does not hold this job's secret"),
        (Token(tokens.Ticket("mine", 1 << 40, 0, bytes(12)).pack(), token().key), "does not hold this job's secret"),
    ],
    ids=["stale", "of another job", "without its key", "too long", "changed"],
)
def test_join_token_that_is_invalid_is_refused(
    invitation: Token, said: str, coordinator: Coordinator, captured: CapturedLog
) -> None:
    with pytest.raises(Refused, match=said):
        join(coordinator, "guest", invitation)
    captured.wait_for(f"refused .*{said}")
    assert join(coordinator, "host", SECRET).rank == 0


def test_join_token_admits_as_many_members_as_it_was_made_for(coordinator: Coordinator) -> None:
    invitation = token(uses=1)
    join(coordinator, "guest", invitation)
    with pytest.raises(Refused, match=r"has no uses left \(1 of 1 used\)"):
        join(coordinator, "friend", invitation)


def test_join_token_holder_represents_only_members_that_it_brought(coordinator: Coordinator) -> None:
    address, invitation = coordinator.address, token(uses=0)
    host = join(coordinator, "host", SECRET).members[0]
    assert heartbeat(address, ["host"], gone=["host"], secret=invitation).unknown == ("host",)
    with pytest.raises(Refused, match="the id 'host' is registered with other credentials"):
        join(coordinator, "host", invitation)
    assert heartbeat(address, [], gone=["host"], secret=invitation).evicted == (), "a refused claim gives no rights"
    for call in (
        lambda: unregister(address, host, secret=invitation),
        lambda: end_checkpoint(address, "host", 1, secret=invitation),
    ):
        with pytest.raises(Refused, match="host did not join with the caller's join token"):
            call()
    news = heartbeat(address, ["host"], secret=SECRET)
    assert (news.evicted, news.unknown, news.size) == ((), (), 1)


def test_join_token_claim_that_was_refused_uses_nothing_up(coordinator: Coordinator) -> None:
    invitation = token(uses=1)
    with pytest.raises(Refused, match="expects a job of 3 ranks"):
        register(coordinator.address, member("one"), size=3, secret=invitation, job=None, timeout=60)
    assert join(coordinator, "other", invitation).rank == 0


def test_join_token_heartbeat_for_other_ids_reveals_nothing(coordinator: Coordinator, captured: CapturedLog) -> None:
    """A launcher sends heartbeats for its workers before they have registered, and must not be refused for that."""
    address, invitation = coordinator.address, token(uses=0)
    join(coordinator, "host", SECRET)
    assert heartbeat(address, ["guest"], gone=["host", "friend"], secret=invitation).evicted == ()
    assert captured.count("refused") == 0


@pytest.mark.parametrize("with_token", [True, False])
def test_launcher_with_a_join_token_keeps_the_leases_of_its_workers(
    with_token: bool, serve: Serve, captured: CapturedLog
) -> None:
    """Heartbeats begin before the workers have registered. The test runs longer than a lease, without a refusal."""
    coordinator = serve(2, minimum=1, maximum=3, job="mine", lease=0.5)
    secret: bytes | Token = token(uses=0) if with_token else SECRET
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(coordinator.address, ["box/0", "box/1"], secret=secret, on_news=told.put, interval=0.05)
    beats.start()
    try:
        assert told.get(timeout=60).generation == 0
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: join(coordinator, name, secret), ["box/0", "box/1"]))
        news = [told.get(timeout=60) for _ in range(40)]  # takes at least 2 s
        assert (news[-1].generation, news[-1].evicted, news[-1].size) == (1, (), 2)
        beats.gone(["box/1"])
        while not (latest := told.get(timeout=60)).evicted:
            pass
        assert latest.evicted == ("box/1",)
    finally:
        beats.close()
    assert captured.count("refused|no heartbeat") == 0


def test_join_token_members_are_remembered_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    options = {"minimum": 1, "maximum": 2, "job": "mine", "journal": tmp_path / "journal"}
    first = serve(1, **options)
    invitation = token(uses=1)
    join(first, "guest", invitation)
    first.stop()
    second = serve(1, **options)
    assert join(second, "guest", invitation, generation=1).generation == 2
    with pytest.raises(Refused, match=r"has no uses left \(1 of 1 used\)"):
        join(second, "friend", invitation)


def test_worker_node_takes_a_join_token_from_the_environment(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", tokens.make(SECRET, job="mine", expires_in=60))
    with gw.WorkerNode(coordinator.address, "guest", timeout=60) as node:
        assert node.rank == 0
        assert node.healthy(30)
