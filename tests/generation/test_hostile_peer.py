"""An admitted peer that sends invalid data: nothing is allocated for it, and only this peer is declared lost."""

from __future__ import annotations

import json
import resource
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import parse_dtype
from gradwire.collectives import DEFAULTS
from gradwire.generation.establish import Endpoint
from gradwire.generation.message_format import MAX_DESCRIPTION, Description
from gradwire.group.internals import parts_of
from gradwire.identity import Identity
from gradwire.job.init import connect_in_process
from gradwire.topology import Topology
from gradwire.transports.base import CONTROL_CHANNEL, MESSAGE_CHANNEL, Link
from gradwire.transports.frames import Outbox
from gradwire.transports.local import Hub
from gradwire.wire import MAX_CONTROL, MAX_EAGER, Header, Kind
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.in_process import groups_fixture as groups_fixture
from support.in_process import pair_fixture as pair_fixture
from support.messages import described
from support.ranks import eventually, run_ranks

LONG = 60.0
GIB = 1 << 30
MIB = 1 << 20


def header(sender: gw.Group, kind: int, nbytes: int = 0, **fields: int) -> bytes:
    """Return a header that this rank could send."""
    identity = parts_of(sender).generation.identity
    known = {"group": 1, "sequence": 1, "fingerprint": 0, "tile": 0, "round": 0, "source": identity.rank}
    return Header(
        kind=kind,
        job=identity.job,
        generation=identity.number,
        nbytes=nbytes,
        **(known | fields),
    ).pack()


def offer(sender: gw.Group, nbytes: int, describing: int | None = None, **fields: int) -> bytes:
    """Return an offer of a message, whose description may be that of another size."""
    description = described(nbytes if describing is None else describing)
    size = {"tile": nbytes & 0xFFFFFFFF, "round": nbytes >> 32}
    return header(sender, Kind.OFFER, len(description), **(size | fields)) + description


def eager(sender: gw.Group, description: bytes, data: bytes, **fields: int) -> bytes:
    return header(sender, Kind.EAGER, len(description) + len(data), **fields) + description + data


def link(group: gw.Group, channel: int, peer: int = 0) -> Link:
    outbox = parts_of(group).generation.service.outbox(peer, channel)
    assert outbox is not None
    return outbox.link


def control(group: gw.Group, payload: bytes) -> bytes:
    return parts_of(group).generation.identity.frame(Kind.CONTROL, payload)


@pytest.fixture
def no_allocation() -> Iterator[None]:
    """Fail if more than a few megabytes are allocated at any moment."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB, f"{peak / MIB:.1f} MiB were allocated"


def is_declared_lost(groups: list[gw.Group], culprit: int) -> None:
    """Assert that all other ranks name the culprit, and that the culprit itself raises that it was declared lost."""

    def play(group: gw.Group) -> None:
        kind = gw.Aborted if group.rank == culprit else gw.PeerLost
        assert eventually(lambda: not parts_of(group).generation.control.intact)
        with pytest.raises(kind) as caught:
            group.barrier()
        assert caught.value.culprit == culprit
        said = "was declared lost by its peers: it sent invalid data" if group.rank == culprit else "sent invalid data"
        assert said in str(caught.value)

    run_ranks(groups, play)
    assert all(parts_of(group).generation.service.serving for group in groups), "a service thread ended"


INVALID_CONTROL: dict[str, Callable[[gw.Group], bytes]] = {
    "8 GiB": lambda group: header(group, Kind.CONTROL, 8 * GIB),
    "a byte too many": lambda group: header(group, Kind.CONTROL, MAX_CONTROL + 1),
    "another kind": lambda group: header(group, Kind.EAGER, 8),
    "no header": lambda group: b"\xff" * 64,
    "another job": lambda group: Header(Kind.CONTROL, 1, 1, 1, 0, 0, 0, 0, 0, 2).pack() + b"{}",
    "another generation": lambda group: (
        Header(Kind.CONTROL, parts_of(group).generation.identity.job, 2, 1, 0, 0, 0, 0, 0, 2).pack() + b"{}"
    ),
    "no JSON": lambda group: control(group, b"{nope"),
    "no text": lambda group: control(group, b"\xff\xfe\x00"),
    "empty": lambda group: control(group, b""),
    "no object": lambda group: control(group, b"[1, 2]"),
    "deep": lambda group: control(group, b"[" * 100_000),
    "long number": lambda group: control(group, b'{"t": "at", "g": 1' + b"0" * 5000 + b', "s": 1, "c": 1}'),
    "infinite": lambda group: control(group, b'{"t": "at", "g": 1, "s": Infinity, "c": 1}'),
    "wrong types": lambda group: control(group, b'{"t": "at", "g": [], "s": {}, "c": null}'),
    "fields missing": lambda group: control(group, b'{"t": "calls"}'),
    "a finding without sense": lambda group: control(group, b'{"t": "finding", "finding": {"kind": "bored"}}'),
    "an unhashable kind": lambda group: control(group, b'{"t": "finding", "finding": {"kind": [], "reason": ""}}'),
    "a culprit from elsewhere": lambda group: control(
        group, b'{"t": "finding", "finding": {"kind": "lost", "reason": "", "culprit": 99}}'
    ),
    "unknown fields": lambda group: control(
        group, b'{"t": "verdict", "finding": {"kind": "lost", "reason": "", "culprit": 0, "x": 1}}'
    ),
    "a long reason": lambda group: control(
        group, json.dumps({"t": "finding", "finding": {"kind": "aborted", "reason": "x" * 5000}}).encode()
    ),
    "calls without sense": lambda group: control(group, b'{"t": "calls", "g": 1, "among": [0, 1], "calls": [[]]}'),
    "members from elsewhere": lambda group: control(group, b'{"t": "calls", "g": 1, "among": [0, 5], "calls": []}'),
    "calls of wrong types": lambda group: control(
        group,
        b'{"t": "calls", "g": 1, "among": [0], "calls": '
        b'[{"sequence": "1", "fingerprint": [], "what": 3, "site": null, "items": []}]}',
    ),
}


@pytest.mark.parametrize("invalid", INVALID_CONTROL)
@pytest.mark.usefixtures("no_allocation")
def test_control_channel_invalid_message_raises_peer_lost_for_its_sender(
    groups: list[gw.Group], captured: CapturedLog, invalid: str
) -> None:
    attacker = groups[1]
    link(attacker, CONTROL_CHANNEL).send([INVALID_CONTROL[invalid](attacker)])
    is_declared_lost(groups, culprit=1)
    captured.wait_for("rank 1 sent invalid data")


@pytest.mark.parametrize("words", [b"{}", b'{"t": "from the future"}', b'{"t": 3}'])
def test_control_channel_unknown_message_is_ignored(groups: list[gw.Group], words: bytes) -> None:
    link(groups[1], CONTROL_CHANNEL).send([control(groups[1], words)])
    assert run_ranks(groups, lambda group: group.all_reduce(1)) == [len(groups)] * len(groups)


def test_control_channel_flood_of_valid_messages_uses_bounded_memory(groups: list[gw.Group]) -> None:
    tracemalloc.start()
    attacker = groups[1]
    service = parts_of(attacker).generation.service
    outbox = service.outbox(0, CONTROL_CHANNEL)
    assert outbox is not None
    for number in range(4_000):
        words: list[dict[str, Any]] = [
            {"t": "at", "g": number, "s": 1 + number, "c": 5},
            {"t": "at", "g": 1, "s": 1 + number, "c": 5},
            {"t": "here", "g": number, "s": number, "f": 0, "last": "x" * 100},
            {"t": "where", "g": number},
        ]
        service.post_control(0, json.dumps(words[number % 4]).encode())
        while outbox.waiting:
            time.sleep(0.0005)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 8 * MIB
    assert parts_of(groups[0]).generation.control.intact


def test_control_channel_peer_that_reads_no_answers_is_lost_at_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is only an in-process link, because the kernel would buffer megabytes. It reads no answers."""
    monkeypatch.setattr(Outbox, "MAX_WAITING", 100_000)
    mine, theirs = Hub(2).transports
    one = theirs.dial(0, CONTROL_CHANNEL, time.monotonic() + LONG)
    victim_identity, liar_identity = (Identity(bytes(16), 1, rank, ("a", "b"), Topology.single(2)) for rank in (0, 1))
    (victim,) = connect_in_process([Endpoint(victim_identity, mine)], DEFAULTS, LONG, time.monotonic() + LONG)
    generation = parts_of(victim).generation
    outbox = generation.service.outbox(1, CONTROL_CHANNEL)
    assert outbox is not None
    questions, rest = liar_identity.frame(Kind.CONTROL, b'{"t":"where","g":1}') * 50, b""
    while generation.control.intact:
        rest = rest or questions
        sent = one.send([rest])
        rest = rest[sent:]
        assert outbox.waiting_bytes < 10 * Outbox.MAX_WAITING
        if not sent:
            time.sleep(0.001)  # lets the service thread run
    with victim, pytest.raises(gw.PeerLost, match="b does not read its messages"):
        victim.barrier()


INVALID_MESSAGES: dict[str, Callable[[gw.Group], bytes]] = {
    "eager 8 GiB": lambda group: header(group, Kind.EAGER, 8 * GIB),
    "eager, a byte too many": lambda group: header(group, Kind.EAGER, MAX_EAGER + MAX_DESCRIPTION + 1),
    "payload 8 GiB": lambda group: header(group, Kind.PAYLOAD, 8 * GIB),
    "payload that nobody asked for": lambda group: header(group, Kind.PAYLOAD, 8),
    "offer with a description of 8 GiB": lambda group: header(group, Kind.OFFER, 8 * GIB),
    "offer without a description": lambda group: header(group, Kind.OFFER),
    "offer of another size than described": lambda group: offer(group, 8 * GIB, describing=8),
    "eager without a description": lambda group: header(group, Kind.EAGER, 2) + bytes(2),
    "eager, shorter than described": lambda group: eager(group, described(GIB), b"x"),
    "eager, longer than described": lambda group: eager(group, described(1), b"xx"),
    "eager with an unknown dtype": lambda group: eager(group, b"\xff" + described(1)[1:], b"x"),
    "eager with 255 dimensions": lambda group: eager(group, b"\x09\xff\x00" + bytes(255 * 8), b""),
    "eager with a negative tag": lambda group: eager(group, described(1), b"x", fingerprint=(1 << 64) - 2),
    "accept with a payload": lambda group: header(group, Kind.ACCEPT, 8 * GIB),
    "withdrawal with a payload": lambda group: header(group, Kind.WITHDRAW, 1),
    "control": lambda group: header(group, Kind.CONTROL, 0),
    "collective": lambda group: header(group, Kind.COLLECTIVE, 8 * GIB),
    "no header": lambda group: bytes(64),
}


@pytest.mark.parametrize("invalid", INVALID_MESSAGES)
@pytest.mark.usefixtures("no_allocation")
def test_message_channel_invalid_message_raises_peer_lost_for_its_sender(groups: list[gw.Group], invalid: str) -> None:
    attacker = groups[1]
    attacker.send(np.zeros(1), dst=0)  # opens the message link
    link(attacker, MESSAGE_CHANNEL).send([INVALID_MESSAGES[invalid](attacker)])
    is_declared_lost(groups, culprit=1)


@pytest.mark.usefixtures("no_allocation")
def test_message_channel_offer_of_8_gib_allocates_nothing(pair: list[gw.Group]) -> None:
    attacker = pair[1]
    attacker.send(np.zeros(1), dst=0)
    link(attacker, MESSAGE_CHANNEL).send([offer(attacker, 8 * GIB, sequence=5)])
    with pytest.raises(gw.SizeMismatch, match=rf"rank 1 sent {8 * GIB} bytes with tag 0, the buffer has 80"):
        pair[0].recv(np.zeros(1), src=1)
        pair[0].recv(np.zeros(10), src=1)
    run_ranks(pair, lambda group: group.barrier())


def test_recv_without_a_buffer_of_an_offer_without_payload_times_out(pair: list[gw.Group]) -> None:
    """The array of 8 GiB is allocated, but no page of it is used before data arrives."""
    attacker = pair[1]
    attacker.send(np.zeros(1), dst=0, tag=1)
    link(attacker, MESSAGE_CHANNEL).send([offer(attacker, 8 * GIB, sequence=5)])
    assert pair[0].probe(src=1).nbytes == 8 * GIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        with pytest.raises(gw.Timeout, match="the recv can be repeated"):
            pair[0].recv(src=1, timeout=0.05)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KiB
    run_ranks(pair, lambda group: group.barrier())


def test_recv_without_a_buffer_of_an_impossible_shape_raises_array_error(pair: list[gw.Group]) -> None:
    attacker = pair[1]
    attacker.send(np.zeros(1), dst=0, tag=1)
    description = Description(parse_dtype("int8"), (1 << 62, 1 << 62, 0)).pack()  # 0 bytes, but not for NumPy
    link(attacker, MESSAGE_CHANNEL).send([eager(attacker, description, b"")])
    with pytest.raises(gw.ArrayError, match=r"no memory for the message of rank 1, 0 bytes.* is kept"):
        pair[0].recv(src=1)
    assert pair[0].recv(np.zeros(0), src=1) == 1


def test_recv_without_a_buffer_of_more_than_the_memory_raises_array_error(pair: list[gw.Group]) -> None:
    attacker = pair[1]
    attacker.send(np.zeros(1), dst=0, tag=1)
    link(attacker, MESSAGE_CHANNEL).send([offer(attacker, 1 << 62, sequence=5)])
    for _ in range(2):
        with pytest.raises(gw.ArrayError, match=f"no memory for the message of rank 1, {1 << 62} bytes.* is kept"):
            pair[0].recv(src=1)
    run_ranks(pair, lambda group: group.barrier())


def test_message_channel_forged_source_counts_as_the_rank_of_the_link() -> None:
    """The sender of a message is the rank of its link, whatever the header says."""
    groups = gw.local_group(3)
    try:
        attacker, victim, honest = groups[1], groups[0], groups[2]
        attacker.send(np.zeros(1), dst=0, tag=1)
        for source in (2, 7):
            forged = eager(attacker, described(8), np.full(1, 9.0).tobytes(), source=source)
            link(attacker, MESSAGE_CHANNEL).send([forged])
        attacker.send(np.ones(1), dst=0, tag=2)  # sent after the forged ones, on the same link
        x = np.zeros(1)
        assert victim.recv(x, src=None, tag=2) == 1
        honest.send(np.full(1, 2.0), dst=0)
        assert (victim.recv(x, src=None), x[0]) == (2, 2.0)
        honest.send(np.full(1, 3.0), dst=0)
        assert (victim.recv(x, src=2), x[0]) == (2, 3.0)
    finally:
        for group in groups:
            group.close()


def test_message_channel_offers_beyond_the_limit_are_not_read(
    pair: list[gw.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradwire.generation import mailbox

    monkeypatch.setattr(mailbox, "MAX_UNMATCHED_BYTES", 100_000)
    attacker = pair[1]
    attacker.send(np.zeros(1), dst=0)
    one = link(attacker, MESSAGE_CHANNEL)
    number = 1
    while one.send([message := offer(attacker, GIB, sequence=number, fingerprint=number)]) == len(message):
        number += 1  # until the link is full, because it is not read any more
    assert parts_of(pair[0]).generation.mailbox.unmatched_bytes(1) < 1_000_000
    run_ranks(pair, lambda group: group.barrier())


INVALID_HEADERS: dict[str, Callable[[gw.Group, int], bytes]] = {
    "8 GiB": lambda group, print64: header(group, Kind.COLLECTIVE, 8 * GIB, fingerprint=print64),
    "no header": lambda group, print64: b"\xee" * 64,
    "another group": lambda group, print64: header(group, Kind.COLLECTIVE, 8, group=2, fingerprint=print64),
    "another job": lambda group, print64: Header(Kind.COLLECTIVE, 1, 1, 1, 1, 1, print64, 0, 0, 8).pack(),
}


@pytest.mark.parametrize("invalid", INVALID_HEADERS)
@pytest.mark.usefixtures("no_allocation")
def test_collective_channel_invalid_header_raises_peer_lost_for_its_sender(
    groups: list[gw.Group], invalid: str
) -> None:
    attacker, victim = groups[1], groups[0]
    x = np.ones(1024)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            victim.all_reduce(x, algorithm="star")
        except gw.GradwireError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert eventually(lambda: parts_of(victim).runner.calls.last() is not None)
    last = parts_of(victim).runner.calls.last()
    assert last is not None
    parts_of(attacker).generation.world_links[0].send([INVALID_HEADERS[invalid](attacker, last.fingerprint)])
    waiting.join()
    assert [type(error) for error in caught] == [gw.PeerLost]
    assert getattr(caught[0], "culprit", None) == 1
    assert "sent invalid data during all_reduce #1" in str(caught[0])
    is_declared_lost(groups, culprit=1)


def test_service_thread_that_fails_aborts_the_group_with_the_reason(
    groups: list[gw.Group], captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in gradwire must not make the other ranks hang."""

    def fail(now: float) -> float:
        raise ZeroDivisionError("a bug")

    victim: Any = groups[0]
    monkeypatch.setattr(parts_of(victim).generation.control, "tick", fail)
    parts_of(victim).generation.service.wake()

    def play(group: gw.Group) -> str:
        with pytest.raises(gw.Aborted) as caught:
            group.recv(np.zeros(1), src=(group.rank + 1) % group.size)
        assert caught.value.culprit == 0
        return str(caught.value)

    for text in run_ranks(groups, play):
        assert text.endswith("gave up: its service thread failed: ZeroDivisionError: a bug")
    captured.wait_for("the service thread of rank 0 failed")
