"""Renews the lease of a worker without a launcher: a thread sends a heartbeat every second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from gradwire.errors import GradwireError
from gradwire.membership.client.heartbeat_rules import interval as interval_for
from gradwire.membership.client.launcher_heartbeats import INTERVAL, not_a_member
from gradwire.membership.client.requests import heartbeat
from gradwire.membership.client.session import Secret
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

_REPLY_SECONDS = 2.0  # after which a heartbeat without a reply has failed; much shorter than a lease


class Lease:
    """Renews a member's lease by single calls. No connection is open between two heartbeats.

    `on_news` is called with each reply, from the lease's thread. If the coordinator does not answer, the worker
    continues; the log has one line when the coordinator stops answering, and one when it answers again. It also has one
    line for each other member that the coordinator removes from the generation.
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
        lease: float = 0.0,
        logger: logging.Logger = log,
    ) -> None:
        """`lease` is the seconds that the coordinator announced; 0 if they are unknown. Its news updates them."""
        self._address, self._id, self._secret, self._credentials = address, member_id, secret, credentials
        self._run_id = run
        self._last_warning = ""
        self._seal = WorkerSeal(secret)
        self._on_news = on_news
        self._longest_interval, self._lease = interval, lease
        self._log = logger
        self._evicted: tuple[int, frozenset[str]] = (0, frozenset())  # the generation, and its members in the log
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.news: News | None = None  # the last reply
        self.failure = ""  # why the last heartbeat had no reply

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="gradwire-lease", daemon=True)
        self._thread.start()

    def enter(self, run: bytes) -> None:
        """Record that the member is in a generation of `run` now."""
        self._run_id = run

    def close(self) -> None:
        """Stop the heartbeats. Idempotent; it does nothing in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._closed.set()
        if thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """Drop the lease in a forked child. The parent keeps renewing it."""
        self._thread = None

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + interval_for(self._lease, self._longest_interval)
            try:
                news = self._heartbeat()
            except GradwireError as error:
                if not self.failure:
                    self._log.warning("this worker continues without its coordinator: %s", error)
                self.failure = str(error)
                continue
            except Exception as error:  # an error in gradwire must not cost the worker its lease
                self._log.exception("an internal error of gradwire interrupted a heartbeat of this worker")
                self.failure = str(error)
                continue
            if self.failure:
                self._log.info("the coordinator at %s answers again", self._address)
            self.failure, self.news = "", news
            self._lease = news.lease
            self._warn(not_a_member(news, self._id, self._run_id))
            self._log_evictions(news)
            self._deliver(news)

    def _log_evictions(self, news: News) -> None:
        generation, known = self._evicted
        evicted = frozenset(news.evicted) - {self._id}
        for name in sorted(evicted.difference(known) if generation == news.generation else evicted):
            self._log.warning(
                "the coordinator at %s removed %s from generation %d: it died, sent no heartbeat or was unreachable",
                self._address,
                name,
                news.generation,
            )
        self._evicted = (news.generation, evicted)

    def _warn(self, reason: str) -> None:
        if reason and reason != self._last_warning:
            self._log.warning("the coordinator at %s %s", self._address, reason)
        self._last_warning = reason

    def _heartbeat(self) -> News:
        return heartbeat(
            self._address,
            [self._id],
            run=self._run_id,
            secret=self._secret,
            timeout=_REPLY_SECONDS,
            credentials=self._credentials,
            seal=self._seal,
        )

    def _deliver(self, news: News) -> None:
        try:
            if self._on_news is not None:
                self._on_news(news)
        except Exception:
            self._log.exception("an error in the callback for the coordinator's news")
