"""Large messages that are interrupted halfway: nothing is lost, and the buffer of a recv that ended is not written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.host import native_core
from gradwire.transports.base import MESSAGE_CHANNEL, Buffer
from gradwire.transports.frames import Outbox
from gradwire.transports.local import LocalLink
from gradwire.transports.tcp.tls_link import TlsLink
from gradwire.transports.tcp.transport import TcpLink
from support.in_process import Clock
from support.in_process import any_pair_fixture as any_pair_fixture
from support.in_process import message_clock_fixture as message_clock_fixture
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

MIB = 1 << 20
WHOLE = 64 * MIB


class Gate:
    """Passes a number of bytes of rank 0's point-to-point messages, and the rest after it is opened."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.error: BaseException | None = None  # raised when it is reached

    def holding(self, send: Callable[[Any, Sequence[Buffer]], int]) -> Callable[[Any, Sequence[Buffer]], int]:
        def gated(link: Any, buffers: Sequence[Buffer]) -> int:
            if link.channel != MESSAGE_CHANNEL or link.peer != 1 or self.opened.is_set():
                return send(link, buffers)
            allowed: list[Buffer] = []
            room = self.room
            for buffer in buffers:
                allowed.append(memoryview(buffer)[:room])
                room -= len(allowed[-1])
            sent = send(link, allowed)
            self.room -= sent
            if not self.room:
                self.reached.set()
                if self.error is not None and not sent:
                    raise self.error
                time.sleep(0.001)
            return sent

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(WHOLE // 2)
    for kind in (TcpLink, LocalLink, TlsLink):
        monkeypatch.setattr(kind, "send", gate.holding(kind.send))
    return gate


def sending(group: gw.Group, x: Any, errors: list[BaseException], **options: Any) -> threading.Thread:
    def send() -> None:
        try:
            group.send(x, dst=1, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def open_message_links(pair: list[gw.Group]) -> None:
    """Open the message link before the clock is stopped: dialling uses the real time."""
    pair[0].send(np.zeros(1), dst=1)
    pair[1].recv(np.zeros(1), src=0)


def at(gate: Gate, action: Callable[[], None]) -> threading.Thread:
    """Run `action` on another thread as soon as a message reaches the gate."""

    def act() -> None:
        gate.reached.wait()
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def time_out_halfway(gate: Gate, group: gw.Group, x: Any) -> None:
    """Receive into x, with timeouts, until the message has arrived as far as the gate."""
    while not gate.reached.is_set():
        x[:] = 0
        with pytest.raises(gw.Timeout, match="the recv can be repeated"):
            group.recv(x, src=0, timeout=0.5)


def message() -> Any:
    return np.random.default_rng(7).integers(0, 256, WHOLE, np.uint8)


def test_recv_after_a_timeout_halfway_gets_the_whole_message(pair: list[gw.Group], gate: Gate) -> None:
    errors: list[BaseException] = []
    sender = sending(pair[0], message(), errors)
    x = np.zeros(WHOLE, np.uint8)
    time_out_halfway(gate, pair[1], x)
    assert x.any()
    x[:] = 0
    with pytest.raises(gw.Timeout):
        pair[1].recv(np.zeros(WHOLE, np.uint8), src=0, timeout=0.05)  # halfway again
    gate.opened.set()
    sender.join()
    assert not errors
    assert not x.any(), "the buffer of a recv that timed out must not be written"
    y = np.zeros(WHOLE, np.uint8)
    assert pair[1].recv(y, src=0) == 0
    assert np.array_equal(y, message())
    assert not x.any()
    pair[0].send(np.ones(3), dst=1)
    pair[1].recv(np.zeros(3), src=0)


def test_recv_after_a_timeout_halfway_may_start_before_the_rest_arrives(pair: list[gw.Group], gate: Gate) -> None:
    errors: list[BaseException] = []
    sender = sending(pair[0], message(), errors)
    time_out_halfway(gate, pair[1], np.zeros(WHOLE, np.uint8))
    y = np.zeros(WHOLE, np.uint8)
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    pair[1].recv(y, tag=0)
    assert np.array_equal(y, message())
    sender.join()
    opener.join()
    assert not errors


def test_send_that_times_out_behind_a_half_sent_message_breaks_nothing_else(
    pair: list[gw.Group], gate: Gate, message_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was accepted and waits for the link. The recv that accepted it then gets the next message instead."""
    refused, hold = threading.Event(), Outbox.hold

    def hold_or_report(outbox: Outbox) -> bool:
        held = hold(outbox)
        if not held:
            refused.set()
        return held

    open_message_links(pair)
    monkeypatch.setattr(Outbox, "hold", hold_or_report)
    message_clock.stop()
    gate.room = 2 * MIB
    big, small = message()[: 4 * MIB], np.arange(20_000.0)  # both are too long to be sent without a recv
    late: list[BaseException] = []
    errors: list[BaseException] = []
    second = sending(pair[0], small, late, tag=2, timeout=1.0)
    with pytest.raises(gw.SizeMismatch):
        pair[1].recv(np.zeros(1), src=0, tag=2)  # received in order, so the small message is offered by now
    first = sending(pair[0], big, errors, tag=1)
    x, y = np.zeros_like(big), np.zeros_like(small)
    receivers = [threading.Thread(target=pair[1].recv, args=args) for args in ((x, 0, 1), (y, 0, 2))]
    receivers[0].start()
    gate.reached.wait()
    refused.clear()
    receivers[1].start()
    refused.wait()
    message_clock.resume()
    second.join()
    assert [type(error) for error in late] == [gw.Timeout]
    assert "waited 1 s for earlier messages to that rank" in str(late[0])
    gate.opened.set()
    first.join()
    pair[0].send(small + 1, dst=1, tag=2)
    for receiver in receivers:
        receiver.join()
    assert not errors
    assert np.array_equal(x, big)
    assert np.array_equal(y, small + 1)
    work = pair[0].stream().all_reduce(1)
    assert pair[1].all_reduce(1) == work.wait() == 2


def test_message_sent_after_a_half_arrived_one_is_received_after_it(pair: list[gw.Group], gate: Gate) -> None:
    errors: list[BaseException] = []
    sender = sending(pair[0], message(), errors)
    x = np.zeros(WHOLE, np.uint8)
    time_out_halfway(gate, pair[1], x)
    pair[0].send(np.ones(3, np.uint8), dst=1)  # queued behind the long message, but send returns
    gate.opened.set()
    sender.join()
    with pytest.raises(gw.SizeMismatch, match=f"sent {WHOLE} bytes"):
        pair[1].recv(np.zeros(3, np.uint8), src=0)
    pair[1].recv(x, src=0)
    pair[1].recv(np.zeros(3, np.uint8), src=0)
    assert np.array_equal(x, message())
    assert not errors


def test_send_that_times_out_halfway_breaks_the_group_and_names_the_receiver(
    pair: list[gw.Group], gate: Gate, message_clock: Clock
) -> None:
    open_message_links(pair)
    errors: list[BaseException] = []
    message_clock.stop()
    sender = sending(pair[0], message(), errors, timeout=0.5)
    starter = at(gate, message_clock.resume)
    with pytest.raises(gw.Timeout, match=r"send to rank 1 did not finish in 0.5 s: rank 1 stopped reading") as caught:
        pair[1].recv(np.zeros(WHOLE, np.uint8), src=0)
    assert caught.value.culprit == 1
    starter.join()
    sender.join()
    assert [type(error) for error in errors] == [gw.GroupTimeout]
    assert gate.reached.is_set()


def test_send_interrupted_by_ctrl_c_halfway_aborts_the_group(pair: list[gw.Group], gate: Gate) -> None:
    gate.error = KeyboardInterrupt()
    errors: list[BaseException] = []
    sender = sending(pair[0], message(), errors)
    with pytest.raises(gw.Aborted, match=r"rank 0 .* gave up: interrupted \(Ctrl-C\) during send") as caught:
        pair[1].recv(np.zeros(WHOLE, np.uint8), src=0)
    assert caught.value.culprit == 0
    sender.join()
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    with pytest.raises(gw.Aborted):
        pair[0].send(np.zeros(1), dst=1)


def test_close_halfway_ends_the_send_and_is_peer_lost_at_the_receiver(pair: list[gw.Group], gate: Gate) -> None:
    errors: list[BaseException] = []
    sender = sending(pair[0], message(), errors)
    closer = at(gate, pair[0].close)
    with pytest.raises(gw.PeerLost, match=r"rank 0 .* left the job during recv") as caught:
        pair[1].recv(np.zeros(WHOLE, np.uint8), src=0)
    assert caught.value.culprit == 0
    closer.join()
    sender.join()
    assert [type(error) for error in errors] == [gw.Closed]


# -- between processes ------------------------------------------------------------------------------------------------


def sends_messages(here: Here, nbytes: int, pure: bool = False) -> None:
    if pure:
        os.environ[native_core.PURE] = "1"
    group = gw.init()
    group.barrier()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if group.rank == 0:
            here.send_when_waiting()
            group.send(np.arange(nbytes // 8), dst=1)
        else:
            here.receive()
            x = np.zeros(nbytes // 8, int)
            try:
                group.recv(x, src=0, timeout=0.5)
            except gw.Timeout as error:
                here.send_error(error)
            here.receive()
            group.recv(x, src=0)
            here.send(whole=bool((x == np.arange(nbytes // 8)).all()))
    except gw.GradwireError as error:
        here.send_error(error)


def test_sender_stopped_for_a_while_loses_no_message_without_the_core(job: StartJob) -> None:
    """With the core, a process that stands still for this long would be lost."""
    with job(sends_messages, 2, WHOLE, True) as ranks:
        assert ranks[0].receive()["waiting"]  # for the recv
        ranks[0].signal(signal.SIGSTOP)
        ranks[1].send()
        assert ranks[1].receive()["error"] == "Timeout"
        ranks[0].signal(signal.SIGCONT)
        ranks[1].send()
        assert ranks[1].receive() == {"whole": True}
        assert [rank.ended() for rank in ranks] == [0, 0]


def test_send_interrupted_by_ctrl_c_while_it_waits_raises_aborted_at_the_receiver(job: StartJob) -> None:
    with job(sends_messages, 2, WHOLE) as ranks:
        assert ranks[0].receive()["waiting"]
        ranks[0].signal(signal.SIGINT)
        assert ranks[0].ended() != 0
        ranks[1].send()
        report = ranks[1].receive()
        assert (report["error"], report["culprit"]) == ("Aborted", 0), report
        assert report["text"].endswith("gave up: KeyboardInterrupt")
