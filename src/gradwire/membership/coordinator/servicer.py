"""Where the coordinator answers calls: proofs and certificates are checked here, and `CallRules` has the answer.

Each call runs in a thread, one at a time at the servicer. A RegisterWorker call is held back until there is news or its
patience ends, and the worker asks again. A held call occupies its thread, so only `HELD` of them are; further workers
are told when to ask again instead. A launcher's stream occupies a thread too, which sleeps between two heartbeats; when
`STREAMS` are taken, launchers use single calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote

from gradwire.errors import ConfigError, JournalError
from gradwire.identity import new_run
from gradwire.membership.codec import (
    Malformed,
    ReplyEncoder,
    checkpoint_to_wire,
    claim_from_wire,
    member_from_wire,
    news_to_wire,
    parse,
)
from gradwire.membership.coordinator.admission_rules import Terms
from gradwire.membership.coordinator.call_rules import CallRules, Denied
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.grpc_import import grpc
from gradwire.membership.sealing import CoordinatorSeal, Stale, Unproven
from gradwire.membership.types import Assembly, Change, Claim, Outcome, Refusal, Waiting
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security.admission import NO_SECRET
from gradwire.security.refusal_log import RefusalLog

if TYPE_CHECKING:
    from gradwire.membership.coordinator.journal import Journal

log = logging.getLogger("gradwire.membership")

HELD = 64  # calls held back at a time
STREAMS = 1024  # of launchers that have proved the secret
STRANGERS = 64  # streams of which nothing is proven yet
THREADS = HELD + STREAMS + STRANGERS + 32
_LONGEST_HOLD = 1.0  # seconds
_LONGEST_PAUSE = 4.0  # seconds; a place lapses after 5
_PAUSE_PER_WAITING = 0.002  # seconds between two questions of a worker that is not held, times those that wait
_USUAL = ("came", "formed", "returned", "left", "checkpoint")  # changes that are nobody's loss

T = TypeVar("T")


class CoordinatorServicer(rpc.MembershipServicer):
    """Answers the calls; each method runs in a thread of the server's pool."""

    def __init__(
        self,
        membership: Membership,
        seal: CoordinatorSeal,
        *,
        vouched: Callable[[Any, Iterable[str]], str | None] = lambda context, names: None,
        proved: Callable[[Any], None] = lambda context: None,
        failed: Callable[[JournalError], None] = lambda error: None,
        seconds_between_heartbeats: float = 10.0,
    ) -> None:
        """`vouched` tells why a caller may not speak for members; `proved` is called with the context of each call that
        proves the job's secret; `failed` hears that the journal cannot be written, after which nobody is told anything.
        A stream without a heartbeat for `seconds_between_heartbeats` is ended.
        """
        self._rules = CallRules(membership, self._save, self._report)
        self._seal = seal
        self._journal: Journal | None = None
        self._vouched = vouched
        self._proved = proved
        self._failed = failed
        self._seconds_between_heartbeats = seconds_between_heartbeats
        self._replies = ReplyEncoder()
        self._refusals = RefusalLog(log)
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._stirred = threading.Condition(self._lock)
        self._held: set[_Held] = set()
        self._streams: set[_Listened] = set()
        self._closed = False

    @property
    def membership(self) -> Membership:
        return self._rules.membership

    # -- calls

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        try:
            return self._seal.answer_hello(request)
        except Unproven:
            self._abort(context, grpc.StatusCode.UNAUTHENTICATED, f"the caller {NO_SECRET}")

    def RegisterWorker(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        body = self._open("RegisterWorker", pb.RegisterWorkerRequest, request, context)
        try:
            claim = claim_from_wire(body, self._rules.next_call())
        except Malformed as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reason = self._vouched(context, [claim.member.id])
        outcome: Outcome = Refusal(reason or "")
        again_after = 0.0
        if reason is None:
            outcome, again_after = self._answer(claim, request.ticket, body.patience_ms / 1000, context)
        if isinstance(outcome, Refusal):
            self._refusals.log("refused %s at %s: %s", claim.member, _peer(context), outcome.reason)
        link_key = b""
        if isinstance(outcome, Assembly) and request.ticket:
            link_key = self._seal.wrap_key(self._seal.link_key(outcome.run), request)
        return self._seal.seal("RegisterWorker", request, self._replies.encode(outcome, again_after, link_key))

    def UnregisterWorker(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        body = self._open("UnregisterWorker", pb.UnregisterWorkerRequest, request, context)
        self._check(context, [body.member.id])
        member, finished, run = member_from_wire(body.member), body.finished, body.run
        known = self._event(
            context, lambda now: self._rules.leave(member, request.ticket, now, finished=finished, run=run)
        )
        reply = pb.UnregisterWorkerReply(known=known)
        return self._seal.seal("UnregisterWorker", request, reply.SerializeToString())

    def Heartbeat(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        return self._beat("Heartbeat", request, context)

    def Heartbeats(self, requests: Iterator[pb.Sealed], context: Any) -> Iterator[pb.Sealed]:  # noqa: N802
        stream = self._listen(context)
        try:
            for request in requests:
                reply = self._beat("Heartbeats", request, context)
                stream.heard = time.monotonic()
                self._prove(stream, context)
                yield reply
        finally:
            with self._lock:
                self._streams.discard(stream)

    def StartCheckpoint(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        return self._checkpoint("StartCheckpoint", self._rules.start_checkpoint, request, context)

    def EndCheckpoint(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        return self._checkpoint("EndCheckpoint", self._rules.end_checkpoint, request, context)

    # -- what the server does

    def resume(self, journal: Journal) -> None:
        """Go on from what a journal holds, if it holds anything, and keep it from now on."""
        snapshot = journal.load()
        if snapshot is None:
            self.membership.terms = replace(self.membership.terms, run=new_run(after=journal.earlier_run()))
            journal.save([], self._rules.snapshot())
        else:
            _check_terms(snapshot, self.membership.terms, journal)
            self._rules.resume(snapshot, time.monotonic())
            members = len(self.membership.members)
            log.info("resumed from %s: generation %d, %d members", journal.path, self.membership.generation, members)
        self._journal = journal

    def keep_time(self) -> None:
        """Tell the membership the time when it wants to know, and cut streams that fell silent, until `close`."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                due = self.membership.due()
                if due is not None and due <= now and self._rules.failure is None:
                    with contextlib.suppress(JournalError):  # `_save` has reported it
                        self._rules.tick(now)
                    due = self.membership.due()
                oldest = now - self._seconds_between_heartbeats
                for stream in [stream for stream in self._streams if stream.heard < oldest]:
                    stream.context.cancel()
                pause = 1.0 if due is None else min(1.0, max(0.005, due - now))
                self._stirred.wait(pause if due is not None or self._streams else None)

    def close(self, grace: float) -> None:
        """Refuse whoever still waits, and return when all have been told, or after `grace` seconds."""
        deadline = time.monotonic() + grace
        with self._lock:
            self.membership.stop("the coordinator was stopped before all ranks had come")
            self._wake()
            while (left := deadline - time.monotonic()) > 0 and self.membership.uninformed(time.monotonic()):
                self._told.wait(min(left, 0.1))
            self._closed = True
            self._stirred.notify_all()

    # -- at the servicer

    def _open(self, method: str, kind: Any, request: pb.Sealed, context: Any) -> Any:
        try:
            body = self._seal.open(method, request)
            self._proved(context)
            return parse(kind, body)
        except Unproven:
            self._abort(context, grpc.StatusCode.UNAUTHENTICATED, f"the caller {NO_SECRET}")
        except Stale:
            self._abort(
                context, grpc.StatusCode.FAILED_PRECONDITION, "the coordinator was started anew; say hello again"
            )
        except Malformed as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _check(self, context: Any, names: Iterable[str]) -> None:
        """Whether a caller's certificate lets it speak for members."""
        reason = self._vouched(context, names)
        if reason is not None:
            self._abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)

    def _event(self, context: Any, event: Callable[[float], T]) -> T:
        """Something happens to the membership; what it changes is in the journal when this returns."""
        try:
            with self._lock:
                answer = event(time.monotonic())
                self._told.notify_all()
        except Denied as denied:
            self._abort(context, grpc.StatusCode.PERMISSION_DENIED, str(denied))
        except JournalError as error:
            self._abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return answer

    def _save(self, changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
        if self._journal is None:
            return
        try:
            self._journal.save(changes, snapshot)
        except JournalError as error:
            log.error("%s; nobody is told anything any more", error)
            self._failed(error)
            raise

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            _log(change)
        if any(change.kind == "formed" for change in changes):
            self._wake()
        self._stirred.notify_all()

    def _answer(self, claim: Claim, ticket: bytes, patience: float, context: Any) -> tuple[Outcome, float]:
        """The answer to a claim, held back while it is only `Waiting`, and after which time to ask again."""
        held = _Held()

        def event(now: float) -> Outcome:
            outcome = self._rules.register(claim, ticket, now, time.time())
            if isinstance(outcome, Waiting) and len(self._held) < HELD:
                self._held.add(held)
            return outcome

        outcome = self._event(context, event)
        if not isinstance(outcome, Waiting):
            return outcome, 0.0
        if held not in self._held:
            return outcome, min(_LONGEST_PAUSE, _PAUSE_PER_WAITING * self.membership.waiting)
        if not context.add_callback(held.cut_off):
            held.cut_off()
        held.wait(min(patience, _LONGEST_HOLD))
        with self._lock:
            self._held.discard(held)
        if held.gone:
            self._event(context, lambda now: self._rules.withdraw(claim))
        return self._event(context, lambda now: self._rules.outcome(claim, now)), 0.0

    def _wake(self) -> None:
        for held in self._held:
            held.news()

    def _beat(self, method: str, request: pb.Sealed, context: Any) -> pb.Sealed:
        body = self._open(method, pb.HeartbeatRequest, request, context)
        self._check(context, [*body.ids, *body.gone])
        news = self._event(
            context, lambda now: self._rules.heartbeat(body.ids, body.gone, body.run, request.ticket, now)
        )
        return self._seal.seal(method, request, news_to_wire(news).SerializeToString())

    def _checkpoint(self, method: str, ask: Any, request: pb.Sealed, context: Any) -> pb.Sealed:
        body = self._open(method, pb.CheckpointRequest, request, context)
        self._check(context, [body.id])
        outcome = self._event(context, lambda now: ask(body.epoch, body.id, request.ticket, now))
        return self._seal.seal(method, request, checkpoint_to_wire(outcome).SerializeToString())

    def _abort(self, context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
        self._refusals.log("refused a call from %s: %s", _peer(context), reason)
        context.abort(code, reason)
        raise AssertionError("abort raises")

    # -- streams

    def _listen(self, context: Any) -> _Listened:
        stream = _Listened(context)
        with self._lock:
            strangers = sum(not other.proven for other in self._streams)
            if strangers < STRANGERS:
                self._streams.add(stream)
                self._stirred.notify_all()
        if strangers >= STRANGERS:
            self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams begin at once")
        return stream

    def _prove(self, stream: _Listened, context: Any) -> None:
        if stream.proven:
            return
        with self._lock:
            stream.proven = sum(other.proven for other in self._streams) < STREAMS
        if not stream.proven:
            self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS} hosts have streams already")


class _Held:
    """A call that is held back until there is news, its time is up, or its caller is gone."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._over = False
        self.gone = False

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._over = True

    def news(self) -> None:
        self._event.set()

    def cut_off(self) -> None:
        """gRPC's word that the call has ended; while it is held, that means that the caller is gone."""
        if not self._over:
            self.gone = True
            self._event.set()


class _Listened:
    """A launcher's stream."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.heard = time.monotonic()
        self.proven = False


def _check_terms(snapshot: Mapping[str, Any], terms: Terms, journal: Journal) -> None:
    """Whether the journal is of the same job. A name that was made up gives way to the one in it."""
    for name, what in {"start": "a start with {}", "minimum": "at least {}", "maximum": "at most {}"}.items():
        here, there = getattr(terms, name), snapshot[name]
        if here != there:
            raise ConfigError(
                f"the journal {journal.path} is of a job of {what.format(there)} members, not {here}: "
                "describe the job as before, or name another file"
            )


def _log(change: Change) -> None:
    log.log(logging.INFO if change.kind in _USUAL else logging.WARNING, "%s", change.text)


def _peer(context: Any) -> str:
    """The caller's address, as people write it: gRPC says "ipv6:%5B::1%5D:4711"."""
    return unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")
