"""Sends a launcher's heartbeats: one stream to the coordinator for all workers of its host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator

from gradwire.errors import GradwireError, NoConnection, Refused
from gradwire.membership.client.grpc_socket import CallFailed
from gradwire.membership.client.heartbeat_rules import HeartbeatRules
from gradwire.membership.client.heartbeat_rules import interval as interval_for
from gradwire.membership.client.session import CoordinatorSession, Secret, pauses_between_tries
from gradwire.membership.codec import Malformed, news_from_wire, parse
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

INTERVAL = 1.0  # seconds from one heartbeat to the next, unless the lease is short
_CONNECT_SECONDS = 2.0  # to connect to the coordinator, before the log reports that it does not answer
_REPLY_SECONDS = 3.0  # after which a stream without a reply is replaced by a new one
# Status codes that are not worth a log line: the next try uses single calls, or sends Hello again.
_EXPECTED_CODES = ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")
_CLOSE_SECONDS = 2.0  # that closing may take, to report members that are gone


class Heartbeats:
    """Reports once a second which members are alive, and at once which are gone, and receives the coordinator's news.

    If the coordinator does not answer, this tries again until it is closed. `on_news` is called with each reply, from
    this object's own thread.
    """

    def __init__(
        self,
        address: str,
        ids: Iterable[str] = (),
        *,
        secret: Secret,
        on_news: Callable[[News], None] | None = None,
        credentials: Credentials | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self._address, self._secret, self._credentials = address, secret, credentials
        self._seal = WorkerSeal(secret)
        self._on_news = on_news
        self._interval = interval
        self._rules = HeartbeatRules(ids)
        self._frozen: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._closed = False
        self._give_up: Callable[[], object] = lambda: None
        self._unary = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. This returns at once, even if the coordinator cannot be reached."""
        self._thread = threading.Thread(target=self._run, name="gradwire-heartbeats", daemon=True)
        self._thread.start()

    def watch(self, ids: Iterable[str]) -> None:
        """Send heartbeats for these members too."""
        with self._changed:
            self._rules.watch(ids)

    def frozen(self, ids: Iterable[str]) -> None:
        """Set the members that are frozen. Heartbeats omit them, so that their leases expire if they stay frozen."""
        with self._changed:
            self._frozen = frozenset(ids)

    def gone(self, ids: Iterable[str]) -> None:
        """Report at once that the processes of these members have ended, and repeat it until it is confirmed."""
        with self._changed:
            self._rules.end(ids)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, after a last report of the members that are gone, if the coordinator answers. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread.join(_CLOSE_SECONDS)
        while thread.is_alive():
            self._give_up()
            thread.join(0.1)

    def _run(self) -> None:
        failing = False
        pauses = pauses_between_tries()
        while not self._closed:
            refused = False
            try:
                for news in self._news():
                    if failing:
                        log.info("the coordinator at %s answers the heartbeats of this host again", self._address)
                    failing, pauses = False, pauses_between_tries()
                    self._deliver(news)
            except GradwireError as error:
                if not failing:
                    log.warning("heartbeats of this host do not reach the coordinator, trying again: %s", error)
                failing, refused = True, isinstance(error, Refused)
            except Exception:  # an error in gradwire must not cost the workers of this host their leases
                log.exception("an internal error of gradwire interrupted the heartbeats of this host")
            with self._changed:
                self._changed.wait_for(lambda: self._closed, 2 * self._interval if refused else next(pauses))

    def _news(self) -> Iterator[News]:
        """Yield the replies to heartbeats, until the connection breaks or this object is closed."""
        with CoordinatorSession(
            self._address, self._secret, _CONNECT_SECONDS, credentials=self._credentials, seal=self._seal
        ) as coordinator:
            self._give_up = lambda: coordinator.set_time_left(0.0)
            code = ""
            with coordinator.suppress_retryable():
                try:
                    if self._unary:
                        yield from self._exchange_heartbeats(lambda body: coordinator.ask("Heartbeat", body))
                    else:
                        stream = coordinator.stream("Heartbeats")
                        yield from self._exchange_heartbeats(lambda body: stream(body, _REPLY_SECONDS))
                    return
                except CallFailed as error:
                    # The coordinator limits the number of streams. Single calls work without one.
                    code = error.code
                    self._unary = code == "RESOURCE_EXHAUSTED"
                    raise
            if code not in _EXPECTED_CODES:
                raise NoConnection(f"the coordinator at {self._address} does not answer: {coordinator.failure}")

    def _exchange_heartbeats(self, ask: Callable[[bytes], bytes]) -> Iterator[News]:
        while True:
            with self._changed:
                sent = self._rules.next(self._frozen)
            request = pb.HeartbeatRequest(ids=sent.ids, gone=sent.gone, run=sent.run)
            try:
                news = news_from_wire(parse(pb.News, ask(request.SerializeToString())))
            except Malformed as error:
                raise NoConnection(
                    f"the coordinator at {self._address} sent a reply that this version of gradwire does not understand"
                ) from error
            with self._changed:
                left_behind = self._rules.answered(sent, news)
            if left_behind is not None:
                log.warning("the coordinator at %s %s", self._address, not_a_member(news, left_behind, sent.run))
            yield news
            with self._changed:
                pause = interval_for(news.lease, self._interval)
                self._changed.wait_for(lambda: self._closed or self._rules.unconfirmed, pause)
                if self._closed and not self._rules.unconfirmed:
                    return

    def _deliver(self, news: News) -> None:
        try:
            if self._on_news is not None:
                self._on_news(news)
        except Exception:
            log.exception("an error in the callback for the coordinator's news")


def not_a_member(news: News, member: str, run: bytes) -> str:
    """Return, for the log, why a coordinator does not know a member of `run`; empty if it does."""
    if run and news.run and news.run != run:
        return (
            f"serves run {news.run.hex()}, and {member} is a member of run {run.hex()}: it was restarted without its "
            "journal. The members of the old run continue until they lose one, and cannot form a new generation then"
        )
    if member in news.unknown:
        return f"does not know {member}: it is not a member of this run"
    return ""
