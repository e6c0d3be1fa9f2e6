"""The service thread: messages posted while other threads hold the locks of the mailbox and the control."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import gradwire as gw
from gradwire.generation.messages import Request
from gradwire.group.internals import parts_of
from gradwire.liveness.verdict import Finding
from gradwire.transports.frames import Outbox
from gradwire.wire import Header, Kind
from support.messages import described

LONG = 60.0
WORLD, TAG, NBYTES = 1, 7, 1 << 20


def test_offer_accepted_while_the_generation_breaks_does_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting holds the mailbox's lock and posts. A break holds the control's lock and notifies the mailbox."""
    one, two = gw.loopback_pair()
    two.send(np.zeros(1), 0)
    one.recv(np.zeros(1), src=1)  # opens a link for the acceptance
    control, mailbox = parts_of(one).generation.control, parts_of(one).generation.mailbox
    in_control, in_mailbox = threading.Event(), threading.Event()
    description = described(NBYTES)
    head = Header(Kind.OFFER, 0, 1, 1, WORLD, 1, TAG, NBYTES, 0, len(description))
    mailbox.finish(1, head, memoryview(description))

    def accept() -> None:
        mailbox.post_request(Request(WORLD, 1, TAG, memoryview(bytearray(NBYTES))))

    def full(outbox: Outbox) -> bool:
        if threading.current_thread() is not accepting:
            return False
        in_mailbox.set()
        assert in_control.wait(LONG)
        return True

    def halt() -> None:  # `Control` calls this with its lock held
        in_control.set()
        assert in_mailbox.wait(LONG)

    def break_up() -> None:
        parts_of(one).generation.failure.on_halt(halt)
        control.report(Finding("aborted", "on purpose", 0), time.monotonic())

    accepting, breaking = (threading.Thread(target=act, daemon=True) for act in (accept, break_up))
    monkeypatch.setattr(Outbox, "full", property(full))
    breaking.start()
    assert in_control.wait(LONG)
    accepting.start()
    for thread in (accepting, breaking):
        thread.join(LONG)
        assert not thread.is_alive(), "deadlock: each thread waits for the other's lock"
    with pytest.raises(gw.Aborted):
        one.barrier()
    one.close()
    two.close()
