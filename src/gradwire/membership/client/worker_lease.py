"""The lease of a worker without a launcher: a thread that sends a heartbeat every second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from gradwire.errors import GradwireError
from gradwire.membership.client.launcher_heartbeats import INTERVAL, not_a_member
from gradwire.membership.client.requests import heartbeat
from gradwire.membership.client.session import Secret
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

_ONE_BEAT = 2.0  # seconds after which a heartbeat without an answer is given up; well within a lease


class Lease:
    """Keeps a member's lease, by calls of their own: no connection is open between two heartbeats.

    `on_news` is called with each answer, from the lease's thread. A coordinator that does not answer is no reason to
    stop working: that it is away, and that it is back, is logged once.
    """

    def __init__(
        self,
        address: str,
        member_id: str,
        *,
        run: bytes = b"",
        secret: Secret,
        on_news: Callable[[News], None] | None = None,
        credentials: Credentials | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self._address, self._id, self._secret, self._credentials = address, member_id, secret, credentials
        self._run_id = run
        self._warned = ""  # of what, last
        self._seal = WorkerSeal(secret)
        self._on_news = on_news
        self._interval = interval
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.news: News | None = None  # the last that were heard
        self.trouble = ""  # why the last heartbeat had no answer

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._run, name="gradwire-lease", daemon=True)
        self._thread.start()

    def enter(self, run: bytes) -> None:
        """The member is in a generation of `run` now."""
        self._run_id = run

    def close(self) -> None:
        """No more heartbeats. Idempotent; in a forked child it does nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._closed.set()
        if thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """In a forked child: the lease stays the parent's."""
        self._thread = None

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + self._interval
            try:
                news = self._beat()
            except GradwireError as error:
                if not self.trouble:
                    log.warning("this worker goes on without its coordinator: %s", error)
                self.trouble = str(error)
                continue
            except Exception as error:  # none is known; but the worker must not lose its lease by it
                log.exception("a heartbeat of this worker was interrupted by an error of gradwire's own")
                self.trouble = str(error)
                continue
            if self.trouble:
                log.info("the coordinator at %s is back", self._address)
            self.trouble, self.news = "", news
            self._warn(not_a_member(news, self._id, self._run_id))
            self._tell(news)

    def _warn(self, reason: str) -> None:
        if reason and reason != self._warned:
            log.warning("the coordinator at %s %s", self._address, reason)
        self._warned = reason

    def _beat(self) -> News:
        return heartbeat(
            self._address,
            [self._id],
            run=self._run_id,
            secret=self._secret,
            timeout=_ONE_BEAT,
            credentials=self._credentials,
            seal=self._seal,
        )

    def _tell(self, news: News) -> None:
        try:
            if self._on_news is not None:
                self._on_news(news)
        except Exception:
            log.exception("the news from the coordinator could not be passed on")
