"""The lifeline without a group: its links, its heartbeats and tokens, and which ranks it reports as lost."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradwire.host import machine, native_core
from gradwire.liveness import heartbeat_messages, lifeline
from gradwire.liveness.control import Control
from gradwire.liveness.detector import PEER_SECONDS, POLL_SECONDS, SLOW_HEARTBEAT_SECONDS, STARVED_SECONDS, Observation
from gradwire.liveness.heartbeat_messages import TOKEN_BYTES, HeartbeatSink, Tokens
from gradwire.liveness.lifeline import (
    ALL_PAIRS,
    HEARTBEAT_THREAD,
    HeartbeatProfile,
    Lifeline,
    heartbeat_thread_waits,
    linked,
)
from gradwire.transports.base import LIFELINE_CHANNEL, Buffer, Link, LinkClosed
from gradwire.transports.frames import Reader
from gradwire.wire import HEADER_BYTES, Header, Kind
from support.ranks import eventually

LONG = 30.0
needs_core = pytest.mark.skipif(not native_core.available(), reason="its thread is native")


def frame(kind: Kind = Kind.BEAT, nbytes: int = 0, source: int = 1) -> bytes:
    return Header(kind, 5, 1, source, 0, 0, 0, 0, 0, nbytes).pack()


class SocketLink:
    """A link over a socket."""

    channel = LIFELINE_CHANNEL

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.settimeout(LONG)

    def fileno(self) -> int:
        return self.near.fileno()

    def send(self, buffers: Sequence[Buffer]) -> int:
        return self.near.send(b"".join(buffers))

    def receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            got = self.near.recv_into(buffers[0])
        except BlockingIOError:
            return 0
        except ConnectionResetError:  # the other end was closed before it read all heartbeats
            raise LinkClosed from None
        if not got:
            raise LinkClosed
        return got

    def close(self) -> None:
        self.near.close()

    def read(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            found += self.far.recv(nbytes - len(found))
        return found


class KeyedLink(SocketLink):
    """A link that was admitted inside TLS."""

    key = b"of this link, and of no other..."


class AdoptingTransport:
    """The part of a transport that a lifeline uses."""

    taker: Callable[[Link], None]

    def __init__(self, relayed: bool) -> None:
        self.relayed = relayed

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        assert channel == LIFELINE_CHANNEL
        self.taker = taker


class Harness:
    """Rank 1 of 3 with its lifeline, and the links to ranks 0 (dialled) and 2 (adopted)."""

    def __init__(
        self,
        kind: type[SocketLink] = SocketLink,
        native: bool | None = None,
        remote: Sequence[int] = (),
        relayed: bool = False,
    ) -> None:
        self.control = Control(1, ["a", "b", "c"], 1, lambda peer, message: None, lambda: None)
        self.links = {0: kind(0), 2: kind(2)}
        self.ended: list[int] = []
        self.sink = HeartbeatSink(lambda header: None)
        self.lifeline = Lifeline(self.control, frame(), self.sink, self.pump, remote)
        self.transport: Any = AdoptingTransport(relayed)
        self.profile = HeartbeatProfile(native_core.available() if native is None else native, os.getpid(), "")
        self.lifeline.begin(self.profile.native, None)
        self.lifeline.connect(None, 3, self.transport, self.links.__getitem__)  # type: ignore[arg-type]
        self.transport.taker(self.links[2])

    def pump(self, reader: Reader) -> None:
        try:
            while reader.pump():
                pass
        except LinkClosed:
            self.ended.append(reader.link.peer)
            self.lifeline.link_ended(reader.link)
            reader.link.close()

    def close(self) -> None:
        self.lifeline.close()
        for link in self.links.values():
            link.near.close()
            link.far.close()


@pytest.fixture(name="harness")
def harness_fixture(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness = Harness(**getattr(request, "param", {}))
    yield harness
    harness.close()


@pytest.mark.parametrize("size", [2, 5, ALL_PAIRS, ALL_PAIRS + 1, 100])
def test_linked_gives_both_ends_the_same_links(size: int) -> None:
    hosts = [rank // 4 for rank in range(size)]
    pairs = set()
    for rank in range(size):
        sharing = {peer for peer in range(size) if hosts[peer] == hosts[rank] and peer != rank}
        pairs |= {(rank, peer) for peer in linked(rank, size, sharing)}
    assert pairs == {(b, a) for a, b in pairs}
    assert all(hosts[a] != hosts[b] for a, b in pairs)
    if size <= ALL_PAIRS:
        assert len(pairs) == sum(a != b for a in hosts for b in hosts)
    else:
        assert {a for a, b in pairs if b == (a + 1) % size} == {
            a for a in range(size) if hosts[a] != hosts[(a + 1) % size]
        }


def test_heartbeat_profile_survives_the_wire() -> None:
    own = HeartbeatProfile.own()
    assert HeartbeatProfile.from_wire(own.to_wire()) == own
    assert (own.native, own.pid, own.timeout) == (native_core.available(), os.getpid(), PEER_SECONDS)
    assert HeartbeatProfile.from_wire(HeartbeatProfile.own(7.5).to_wire()).timeout == 7.5
    assert HeartbeatProfile.from_wire([True, 1, "n", 2, 7]) == HeartbeatProfile(True, 1, "n", 2, 7.0)
    of_others = ([True, 1, "n"], [True, 1, "n", 2, math.inf], [True, 1, "n", 2, 0], [True, 1, "n", 2, "3"])
    for malformed in (None, [], [1, 2, 3], {"native": True}, *of_others):
        assert HeartbeatProfile.from_wire(malformed) == HeartbeatProfile(False, 0, "")


def test_observe_later_process_with_the_same_pid_is_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        status = machine.process_status(child.pid)
        assert status is not None
        seen = HeartbeatProfile(True, child.pid, "n", status.started)
        assert seen.observe() in (Observation.OTHER, Observation.STARVED)
        ended = HeartbeatProfile(True, child.pid, "n", status.started - 1)
        assert ended.observe() is Observation.STOPPED, "another process has this pid now"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert seen.observe() is Observation.STOPPED
    finally:
        child.kill()
        child.communicate()
    assert seen.observe() is Observation.STOPPED


def threads_called(name: bytes) -> int:
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            count += path.read_bytes().strip() == name
    return count


@needs_core
def test_heartbeat_thread_waits_is_false_for_an_idle_thread() -> None:
    thread = native_core.native.Lifeline(10.0)
    thread.start()
    try:
        assert eventually(lambda: threads_called(HEARTBEAT_THREAD) == 1 and not heartbeat_thread_waits(os.getpid()))
    finally:
        thread.stop()
    assert not heartbeat_thread_waits(os.getpid())


@needs_core
def test_lifeline_sends_heartbeats_on_its_links(harness: Harness) -> None:
    for link in harness.links.values():
        assert link.read(3 * HEADER_BYTES) == 3 * frame()


@pytest.mark.parametrize("harness", [{"native": False}, {"relayed": True}], indirect=True, ids=["pure", "relayed"])
def test_lifeline_without_the_core_or_over_relayed_links_sends_a_heartbeat_at_each_tick(harness: Harness) -> None:
    now = time.monotonic()
    for step in range(4):
        harness.lifeline.tick(now + step * SLOW_HEARTBEAT_SECONDS)
    for link in harness.links.values():
        assert link.read(4 * HEADER_BYTES) == 4 * frame()


@needs_core
@pytest.mark.parametrize("harness", [{"kind": KeyedLink}], indirect=True)
def test_lifeline_makes_tokens_ahead_and_sends_them_in_order(harness: Harness) -> None:
    for tick in range(heartbeat_messages.STOCK_BLOCKS // lifeline.FEED_BLOCKS + 1):
        harness.lifeline.tick(time.monotonic() + tick)
    for link in harness.links.values():
        left = harness.lifeline.tokens_ahead(link)
        assert (
            (heartbeat_messages.STOCK_BLOCKS - 1) * heartbeat_messages.BLOCK_TOKENS
            < left
            <= heartbeat_messages.STOCK_BLOCKS * heartbeat_messages.BLOCK_TOKENS
        )
        assert link.read(10 * TOKEN_BYTES) == Tokens(KeyedLink.key, 1).take(10 * TOKEN_BYTES)


def test_token_stock_lasts_for_hours_without_the_interpreter() -> None:
    assert heartbeat_messages.LASTS_SECONDS > 4 * 3600
    assert heartbeat_messages.MARK_BLOCKS < heartbeat_messages.STOCK_BLOCKS


@pytest.mark.parametrize("harness", [{"kind": KeyedLink, "native": False}], indirect=True)
def test_lifeline_without_the_core_sends_tokens(harness: Harness) -> None:
    now = time.monotonic()
    for step in range(4):
        harness.lifeline.tick(now + step * SLOW_HEARTBEAT_SECONDS)
    for link in harness.links.values():
        assert link.read(4 * TOKEN_BYTES) == Tokens(KeyedLink.key, 1).take(4 * TOKEN_BYTES)


GENUINE = Tokens(KeyedLink.key, 2).take(3 * TOKEN_BYTES)


@pytest.mark.parametrize("harness", [{"kind": KeyedLink}], indirect=True)
def test_lifeline_counts_complete_tokens_as_heartbeats(harness: Harness) -> None:
    harness.lifeline.watch([HeartbeatProfile(True, os.getpid(), "")] * 3)
    now = time.monotonic()
    harness.lifeline.tick(now)
    at = 0
    for nbytes, heard in ((1, False), (TOKEN_BYTES - 1, True), (0, False), (TOKEN_BYTES, True), (3, False)):
        now += POLL_SECONDS
        harness.links[2].far.send(GENUINE[at : at + nbytes])
        at += nbytes
        harness.lifeline.tick(now)
        assert (harness.sink.detector.last_heartbeat(2) == now) is heard


@pytest.mark.parametrize("harness", [{"kind": KeyedLink}], indirect=True)
@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(GENUINE[:TOKEN_BYTES], id="replayed"),
        pytest.param(GENUINE[2 * TOKEN_BYTES :], id="out of order"),
        pytest.param(Tokens(KeyedLink.key, 1).take(2 * TOKEN_BYTES)[TOKEN_BYTES:], id="reflected"),
        pytest.param(Tokens(bytes(32), 2).take(2 * TOKEN_BYTES)[TOKEN_BYTES:], id="of another link"),
        pytest.param(bytes(TOKEN_BYTES), id="made up"),
        pytest.param(frame(source=2), id="a beat without a token"),
    ],
)
def test_lifeline_token_that_is_not_the_next_ends_the_link_and_does_not_count(
    harness: Harness, forged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.monotonic()
    harness.lifeline.watch([HeartbeatProfile(True, os.getpid(), "")] * 3)
    harness.links[2].far.send(GENUINE[:TOKEN_BYTES])
    harness.lifeline.tick(now)
    heard_at = harness.sink.detector.last_heartbeat(2)
    harness.links[2].far.send(forged)
    harness.lifeline.tick(now + POLL_SECONDS)
    assert harness.sink.detector.last_heartbeat(2) == heard_at
    assert harness.ended == [2]
    assert "it received a wrong heartbeat token" in caplog.text


def test_lifeline_unexpected_links_are_closed(harness: Harness) -> None:
    for peer in (0, 1, 2, 7):
        unasked = SocketLink(peer)
        harness.lifeline.add_link(unasked)
        assert unasked.fileno() == -1
        unasked.far.close()


def has_heartbeat(harness: Harness, peer: int, now: float) -> bool:
    harness.links[peer].far.send(frame(source=peer))
    harness.lifeline.tick(now)
    return harness.sink.detector.silence(peer, now) == 0


@needs_core
def test_lifeline_silence_on_a_link_is_a_loss(harness: Harness) -> None:
    harness.lifeline.watch([harness.profile] * 3)
    now = time.monotonic()
    while harness.control.intact:
        now += POLL_SECONDS
        assert has_heartbeat(harness, 0, now)
    assert harness.control.await_verdict(LONG)
    error = harness.control.error(None, "")
    assert (type(error).__name__, error.culprit) == ("PeerLost", 2)
    assert re.match(r"c has been silent for 0\.[67]\d s", str(error))


@needs_core
def test_lifeline_ignored_rank_is_lost_although_it_sends_heartbeats(harness: Harness) -> None:
    harness.lifeline.watch([harness.profile] * 3)
    harness.lifeline.ignore(0)
    now = time.monotonic()
    while harness.control.intact:
        now += POLL_SECONDS
        harness.links[0].far.send(frame(source=0))
        assert has_heartbeat(harness, 2, now)
    assert harness.control.unreachable_peers == (0,)


@needs_core
def test_lifeline_rank_that_left_is_not_reported(harness: Harness) -> None:
    harness.lifeline.watch([harness.profile] * 3)
    now = time.monotonic()
    harness.control.receive(2, b'{"t":"bye"}', now)
    for _ in range(40):
        now += POLL_SECONDS
        assert has_heartbeat(harness, 0, now)
    assert harness.control.intact


@needs_core
def test_lifeline_link_that_ends_is_no_loss_and_is_not_written_to_again(harness: Harness) -> None:
    harness.lifeline.watch([harness.profile] * 3)
    descriptor = harness.links[2].fileno()
    harness.links[2].far.close()
    harness.lifeline.tick(time.monotonic())
    assert harness.ended == [2]
    assert harness.control.intact
    with contextlib.closing(SocketLink(2)) as another:
        reused = another.fileno() == descriptor
        if not reused:  # until another socket gets the descriptor of the closed one
            os.dup2(another.fileno(), descriptor)
        harness.links[0].read(3 * HEADER_BYTES)  # heartbeats continue on the other link
        another.far.setblocking(False)
        with pytest.raises(BlockingIOError):
            another.far.recv(1)
        if not reused:
            os.close(descriptor)
        another.far.close()


@pytest.mark.parametrize("data", [frame(Kind.CONTROL), frame(nbytes=1), b"\xff" * HEADER_BYTES])
def test_lifeline_refuses_frames_that_are_not_heartbeats(harness: Harness, data: bytes) -> None:
    harness.links[0].far.send(data)
    with pytest.raises(ValueError, match=r"on the lifeline|not a gradwire message"):
        harness.lifeline.tick(time.monotonic())


def test_observe_sees_only_processes_of_the_same_namespace(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = HeartbeatProfile(True, 11, "7", 5), HeartbeatProfile(True, 11, "8", 5)
    harness.lifeline.watch([here, here, elsewhere])
    observations = {
        **dict.fromkeys("TtZX", Observation.STOPPED),
        "S": Observation.OTHER,
        "R": Observation.STARVED,
        "D": Observation.STARVED,
    }
    for state, observation in observations.items():
        monkeypatch.setattr(machine, "process_status", lambda pid, state=state: machine.ProcessStatus(state, 5))
        monkeypatch.setattr(lifeline, "heartbeat_thread_waits", lambda pid, state=state: state == "R")
        assert [harness.lifeline.observe(peer) for peer in (0, 2)] == [observation, None]


@pytest.mark.parametrize(("state", "waits"), [("R", True), ("D", True), ("S", False), ("T", False)])
def test_heartbeat_thread_waits_is_true_for_a_thread_that_waits_for_a_core_or_the_kernel(
    monkeypatch: pytest.MonkeyPatch, state: str, waits: bool
) -> None:
    monkeypatch.setattr(machine, "process_status", lambda pid: machine.ProcessStatus(state, 5))
    monkeypatch.setattr(lifeline, "HEARTBEAT_THREAD", Path("/proc/self/comm").read_bytes().strip())
    assert heartbeat_thread_waits(os.getpid()) is waits


class LossyLink(SocketLink):
    """A link to another host."""

    lossy = False
    repaired_within = 0.0

    def drops_packets(self) -> bool:
        return self.lossy

    def repair_within(self, seconds: float) -> None:
        self.repaired_within = seconds


def silence_on(harness: Harness, *, lossy_after: float, lossy_until: float = math.inf) -> float:
    """Return how long rank 2 is silent before it is lost, if packets are dropped in this part of the silence."""
    now = began = time.monotonic()
    link = harness.links[2]
    assert isinstance(link, LossyLink)
    while harness.control.intact:
        now += POLL_SECONDS / 2
        link.lossy = lossy_after <= now - began < lossy_until
        harness.links[0].far.send(frame(source=0))
        harness.lifeline.tick(now)
    harness.control.tick(now + 1)
    assert harness.control.decided
    return now - began


@needs_core
@pytest.mark.parametrize("harness", [{"kind": LossyLink, "remote": [0, 2]}], indirect=True)
@pytest.mark.parametrize(
    ("timeout", "lossy_after", "lossy_until", "seconds", "reason"),
    [
        (3.0, math.inf, math.inf, 3.0, "frozen or cut off"),
        (3.0, 0.0, math.inf, 3.0, "the network to rank 2 drops packets"),
        (20.0, math.inf, math.inf, STARVED_SECONDS, "frozen or cut off"),
        (20.0, 0.0, math.inf, 20.0, "the network to rank 2 drops packets"),
        (20.0, 1.0, 2.0, 20.0, "the network to rank 2 drops packets"),
    ],
)
def test_lifeline_network_that_drops_packets_gets_the_whole_deadline_between_hosts(
    harness: Harness, timeout: float, lossy_after: float, lossy_until: float, seconds: float, reason: str
) -> None:
    profiles = [HeartbeatProfile(True, 1, f"machine {rank}", 5, timeout if rank else PEER_SECONDS) for rank in range(3)]
    harness.lifeline.watch(profiles)
    found = silence_on(harness, lossy_after=lossy_after, lossy_until=lossy_until)
    assert found == pytest.approx(seconds, abs=2 * POLL_SECONDS)
    assert reason in str(harness.control.error(None, ""))
    link = harness.links[2]
    assert isinstance(link, LossyLink)
    assert link.repaired_within == max(1.0, timeout / 4)


@needs_core
@pytest.mark.parametrize("harness", [{"kind": LossyLink, "remote": [0, 2]}], indirect=True)
def test_lifeline_rank_without_the_core_on_another_host_has_ten_seconds(harness: Harness) -> None:
    harness.lifeline.watch([HeartbeatProfile(True, 1, "a", 5), harness.profile, HeartbeatProfile(False, 1, "b", 5)])
    assert silence_on(harness, lossy_after=math.inf) == pytest.approx(lifeline.PURE_SECONDS, abs=2 * POLL_SECONDS)


@needs_core
@pytest.mark.parametrize("harness", [{"kind": LossyLink, "remote": [0, 2], "relayed": True}], indirect=True)
@pytest.mark.parametrize(("timeout", "seconds"), [(3.0, lifeline.PURE_SECONDS), (20.0, 20.0)])
def test_lifeline_rank_on_another_host_over_relayed_links_has_ten_seconds_or_the_timeout(
    harness: Harness, timeout: float, seconds: float
) -> None:
    harness.lifeline.watch([HeartbeatProfile(True, 1, name, 5, timeout) for name in "abc"])
    assert silence_on(harness, lossy_after=math.inf) == pytest.approx(seconds, abs=SLOW_HEARTBEAT_SECONDS)
