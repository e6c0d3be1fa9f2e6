"""Answers the coordinator's gRPC calls: checks proofs and certificates, and gets the answers from `CallRules`.

Each call runs in its own thread, and a lock lets one call at a time use `CallRules`. The reply to RegisterWorker is
delayed until the outcome changes or its time limit ends. Then the worker asks again. A delayed call occupies its
thread, so at most `MOST_DELAYED` calls are delayed. Further workers get an answer at once, with a time after which to
ask again. A launcher's stream occupies a thread too, which sleeps between two heartbeats. If there are `MOST_STREAMS`
streams, further launchers use single calls.
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

MOST_DELAYED = 64  # calls with a delayed reply
MOST_STREAMS = 1024  # of launchers that have proved the secret
MOST_UNPROVEN_STREAMS = 64  # streams on which no request has proved the secret yet
THREADS = MOST_DELAYED + MOST_STREAMS + MOST_UNPROVEN_STREAMS + 32
_LONGEST_DELAY = 1.0  # seconds
_LONGEST_PAUSE = 4.0  # seconds; a place lapses after 5
_PAUSE_PER_WAITING = 0.002  # seconds per waiting process: how long a worker pauses whose call was not delayed
_ROUTINE = ("came", "formed", "returned", "left", "checkpoint")  # changes that are not worth a warning

T = TypeVar("T")


class CoordinatorServicer(rpc.MembershipServicer):
    """Answers the calls. Each method runs in a thread of the server's pool."""

    def __init__(
        self,
        membership: Membership,
        seal: CoordinatorSeal,
        *,
        caller_refusal: Callable[[Any, Iterable[str]], str | None] = lambda context, names: None,
        proved: Callable[[Any], None] = lambda context: None,
        failed: Callable[[JournalError], None] = lambda error: None,
        seconds_between_heartbeats: float = 10.0,
    ) -> None:
        """Prepare the servicer.

        `caller_refusal` returns why a caller may not make calls for members, or None. `proved` is called with the
        context of each call that proves the job's secret. `failed` is called if the journal cannot be written; after
        that no call is answered any more. A stream without a heartbeat for `seconds_between_heartbeats` is ended.
        """
        self._rules = CallRules(membership, self._save, self._report)
        self._seal = seal
        self._journal: Journal | None = None
        self._caller_refusal = caller_refusal
        self._proved = proved
        self._failed = failed
        self._seconds_between_heartbeats = seconds_between_heartbeats
        self._replies = ReplyEncoder()
        self._refusals = RefusalLog(log)
        self._lock = threading.Lock()
        self._informed = threading.Condition(self._lock)
        self._timer_changed = threading.Condition(self._lock)
        self._delayed: set[_DelayedCall] = set()
        self._streams: set[_LauncherStream] = set()
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
        reason = self._caller_refusal(context, [claim.member.id])
        outcome: Outcome = Refusal(reason or "")
        again_after = 0.0
        if reason is None:
            outcome, again_after = self._answer(claim, request.ticket, body.wait_ms / 1000, context)
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
        return self._heartbeat("Heartbeat", request, context)

    def Heartbeats(self, requests: Iterator[pb.Sealed], context: Any) -> Iterator[pb.Sealed]:  # noqa: N802
        stream = self._add_stream(context)
        try:
            for request in requests:
                reply = self._heartbeat("Heartbeats", request, context)
                stream.last_heartbeat = time.monotonic()
                self._count_proven(stream, context)
                yield reply
        finally:
            with self._lock:
                self._streams.discard(stream)

    def StartCheckpoint(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        return self._checkpoint("StartCheckpoint", self._rules.start_checkpoint, request, context)

    def EndCheckpoint(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        return self._checkpoint("EndCheckpoint", self._rules.end_checkpoint, request, context)

    # -- what the server does

    def resume(self, journal: Journal) -> bool:
        """Continue from the state in a journal, if it has any, and write to it from now on. Return whether it has."""
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
        return snapshot is not None

    def keep_time(self) -> None:
        """Call `tick` when the membership is due, and cancel streams without heartbeats. Returns after `close`."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                due = self.membership.due()
                if due is not None and due <= now and self._rules.failure is None:
                    with contextlib.suppress(JournalError):  # `_save` has reported it
                        self._rules.tick(now)
                    due = self.membership.due()
                oldest = now - self._seconds_between_heartbeats
                for stream in [stream for stream in self._streams if stream.last_heartbeat < oldest]:
                    stream.context.cancel()
                pause = 1.0 if due is None else min(1.0, max(0.005, due - now))
                self._timer_changed.wait(pause if due is not None or self._streams else None)

    def close(self, grace: float) -> None:
        """Refuse all waiting processes. Return when all have received that answer, or after `grace` seconds."""
        deadline = time.monotonic() + grace
        with self._lock:
            self.membership.stop("the coordinator was stopped before all ranks had registered")
            self._wake()
            while (left := deadline - time.monotonic()) > 0 and self.membership.uninformed(time.monotonic()):
                self._informed.wait(min(left, 0.1))
            self._closed = True
            self._timer_changed.notify_all()

    # -- steps of a call

    def _open(self, method: str, kind: Any, request: pb.Sealed, context: Any) -> Any:
        try:
            body = self._seal.open(method, request)
            self._proved(context)
            return parse(kind, body)
        except Unproven:
            self._abort(context, grpc.StatusCode.UNAUTHENTICATED, f"the caller {NO_SECRET}")
        except Stale:
            self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, "the coordinator was restarted; send Hello again")
        except Malformed as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _check(self, context: Any, names: Iterable[str]) -> None:
        """Abort the call unless the caller's certificate covers the members."""
        reason = self._caller_refusal(context, names)
        if reason is not None:
            self._abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)

    def _event(self, context: Any, event: Callable[[float], T]) -> T:
        """Apply an event to the membership. When this returns, its changes are in the journal."""
        try:
            with self._lock:
                answer = event(time.monotonic())
                self._informed.notify_all()
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
            log.error("%s; the coordinator answers no more calls", error)
            self._failed(error)
            raise

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            _log(change)
        if any(change.kind == "formed" for change in changes):
            self._wake()
        self._timer_changed.notify_all()

    def _answer(self, claim: Claim, ticket: bytes, seconds: float, context: Any) -> tuple[Outcome, float]:
        """Return the answer to a claim, and the seconds after which to ask again.

        The answer `Waiting` is delayed for up to `seconds`, in case the outcome changes.
        """
        delayed = _DelayedCall()

        def event(now: float) -> Outcome:
            outcome = self._rules.register(claim, ticket, now, time.time())
            if isinstance(outcome, Waiting) and len(self._delayed) < MOST_DELAYED:
                self._delayed.add(delayed)
            return outcome

        outcome = self._event(context, event)
        if not isinstance(outcome, Waiting):
            return outcome, 0.0
        if delayed not in self._delayed:
            return outcome, min(_LONGEST_PAUSE, _PAUSE_PER_WAITING * self.membership.waiting)
        if not context.add_callback(delayed.disconnected):
            delayed.disconnected()
        delayed.wait(min(seconds, _LONGEST_DELAY))
        with self._lock:
            self._delayed.discard(delayed)
        if delayed.gone:
            self._event(context, lambda now: self._rules.withdraw(claim))
        return self._event(context, lambda now: self._rules.outcome(claim, now)), 0.0

    def _wake(self) -> None:
        for delayed in self._delayed:
            delayed.wake()

    def _heartbeat(self, method: str, request: pb.Sealed, context: Any) -> pb.Sealed:
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

    def _add_stream(self, context: Any) -> _LauncherStream:
        stream = _LauncherStream(context)
        with self._lock:
            unproven = sum(not other.proven for other in self._streams)
            if unproven < MOST_UNPROVEN_STREAMS:
                self._streams.add(stream)
                self._timer_changed.notify_all()
        if unproven >= MOST_UNPROVEN_STREAMS:
            self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams begin at once")
        return stream

    def _count_proven(self, stream: _LauncherStream, context: Any) -> None:
        if stream.proven:
            return
        with self._lock:
            stream.proven = sum(other.proven for other in self._streams) < MOST_STREAMS
        if not stream.proven:
            self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_STREAMS} hosts already have streams")


class _DelayedCall:
    """A call whose reply is delayed until a generation forms, its time is up, or its caller disconnects."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._over = False
        self.gone = False

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._over = True

    def wake(self) -> None:
        self._event.set()

    def disconnected(self) -> None:
        """Handle gRPC's callback for the end of a call. During the delay it means that the caller has disconnected."""
        if not self._over:
            self.gone = True
            self._event.set()


class _LauncherStream:
    """A launcher's stream."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.last_heartbeat = time.monotonic()
        self.proven = False


def _check_terms(snapshot: Mapping[str, Any], terms: Terms, journal: Journal) -> None:
    """Raise `ConfigError` if the journal is of a job with other sizes."""
    for name, what in {"start": "initial", "minimum": "minimum", "maximum": "maximum"}.items():
        here, there = getattr(terms, name), snapshot[name]
        if here != there:
            raise ConfigError(
                f"the journal {journal.path} belongs to a job whose {what} size is {there}, not {here}: "
                "use the same sizes as before, or begin a new run with another file or with --new"
            )


def _log(change: Change) -> None:
    log.log(logging.INFO if change.kind in _ROUTINE else logging.WARNING, "%s", change.text)


def _peer(context: Any) -> str:
    """Return the caller's address in the usual notation: gRPC writes "ipv6:%5B::1%5D:4711"."""
    return unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")
