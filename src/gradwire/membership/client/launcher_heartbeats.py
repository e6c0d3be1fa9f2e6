"""Heartbeats of a launcher: one stream to the coordinator for all workers of its host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator

from gradwire.errors import GradwireError, NoConnection, Refused
from gradwire.membership.client.grpc_socket import CallFailed
from gradwire.membership.client.heartbeat_rules import HeartbeatRules
from gradwire.membership.client.session import CoordinatorSession, Secret, pauses_between_tries
from gradwire.membership.codec import Malformed, news_from_wire, parse
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

INTERVAL = 1.0  # seconds from one heartbeat to the next
_ONE_TRY = 2.0  # seconds to find the coordinator, before the log says that it is not there
_ANSWER_WITHIN = 3.0  # seconds after which a stream without an answer is given up for a new one
_NO_LOSS = ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")  # the next try will do: with single calls, after a new hello
_LAST_WORD = 2.0  # seconds that closing may take, to say who is gone


class Heartbeats:
    """Says once a second which members live, at once who is gone, and hears the news. A coordinator that was away is
    found again, until this is closed.

    `on_news` is called with each answer, from a thread of this.
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
        """Begin; returns at once, whether or not the coordinator is there."""
        self._thread = threading.Thread(target=self._run, name="gradwire-heartbeats", daemon=True)
        self._thread.start()

    def watch(self, ids: Iterable[str]) -> None:
        """Speak for these members too."""
        with self._changed:
            self._rules.watch(ids)

    def frozen(self, ids: Iterable[str]) -> None:
        """These, and only these, stand still: nothing is said of them, so that their leases run out if that lasts."""
        with self._changed:
            self._frozen = frozenset(ids)

    def gone(self, ids: Iterable[str]) -> None:
        """The processes of these members have ended: said at once, and again until the coordinator has heard it."""
        with self._changed:
            self._rules.end(ids)
            self._changed.notify_all()

    def close(self) -> None:
        """End, having said who is gone if the coordinator is there to hear it. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread.join(_LAST_WORD)
        while thread.is_alive():
            self._give_up()
            thread.join(0.1)

    def _run(self) -> None:
        trouble = False
        pauses = pauses_between_tries()
        while not self._closed:
            refused = False
            try:
                for news in self._conversation():
                    if trouble:
                        log.info("the coordinator at %s answers the heartbeats of this host again", self._address)
                    trouble, pauses = False, pauses_between_tries()
                    self._tell(news)
            except GradwireError as error:
                if not trouble:
                    log.warning("no heartbeats from this host, trying again: %s", error)
                trouble, refused = True, isinstance(error, Refused)
            except Exception:  # none is known; but the workers of this host must not lose their leases by it
                log.exception("the heartbeats of this host were interrupted by an error of gradwire's own")
            with self._changed:
                self._changed.wait_for(lambda: self._closed, 2 * self._interval if refused else next(pauses))

    def _conversation(self) -> Iterator[News]:
        """The answers to the heartbeats, until the connection breaks or this is closed."""
        with CoordinatorSession(
            self._address, self._secret, _ONE_TRY, credentials=self._credentials, seal=self._seal
        ) as coordinator:
            self._give_up = lambda: coordinator.hurry(0.0)
            code = ""
            with coordinator.judged():
                try:
                    if self._unary:
                        yield from self._beats(lambda body: coordinator.ask("Heartbeat", body))
                    else:
                        stream = coordinator.stream("Heartbeats")
                        yield from self._beats(lambda body: stream(body, _ANSWER_WITHIN))
                    return
                except CallFailed as error:
                    # A coordinator has room for so many streams; single calls do as well.
                    code = error.code
                    self._unary = code == "RESOURCE_EXHAUSTED"
                    raise
            if code not in _NO_LOSS:
                raise NoConnection(f"the coordinator at {self._address} does not answer: {coordinator.trouble}")

    def _beats(self, ask: Callable[[bytes], bytes]) -> Iterator[News]:
        while True:
            with self._changed:
                sent = self._rules.next(self._frozen)
            request = pb.HeartbeatRequest(ids=sent.ids, gone=sent.gone, run=sent.run)
            try:
                news = news_from_wire(parse(pb.News, ask(request.SerializeToString())))
            except Malformed as error:
                raise NoConnection(f"the coordinator at {self._address} answers in another version") from error
            with self._changed:
                left_behind = self._rules.answered(sent, news)
            if left_behind is not None:
                log.warning("the coordinator at %s %s", self._address, not_a_member(news, left_behind, sent.run))
            yield news
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._rules.unconfirmed, self._interval)
                if self._closed and not self._rules.unconfirmed:
                    return

    def _tell(self, news: News) -> None:
        try:
            if self._on_news is not None:
                self._on_news(news)
        except Exception:
            log.exception("the news from the coordinator could not be passed on")


def not_a_member(news: News, member: str, run: bytes) -> str:
    """Why a coordinator does not count a member of `run` as its own, for the log; empty if it does."""
    if run and news.run and news.run != run:
        return (
            f"serves run {news.run.hex()}, and {member} is a member of run {run.hex()}: it was started anew without "
            "its journal. The members of the old run go on together until they lose one, and cannot regroup then"
        )
    if member in news.unknown:
        return f"does not know {member}, which is no member of this run"
    return ""
