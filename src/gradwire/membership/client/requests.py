"""Sends a worker's requests to the coordinator: register, leave, heartbeat, checkpoint.

Each request opens its own connection and closes it, because a process that trains may fork at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from gradwire.errors import InvalidSize, NoConnection, Refused, Timeout
from gradwire.membership.client.registration_rules import accepted, other_version
from gradwire.membership.client.session import BYTES_PER_MEMBER, HOLD_SECONDS, CoordinatorSession, Secret
from gradwire.membership.codec import (
    SESSION_BYTES,
    M,
    Malformed,
    assembly_from_wire,
    checkpoint_from_wire,
    claim_to_wire,
    member_to_wire,
    news_from_wire,
    parse,
)
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import (
    LARGEST_JOB,
    Assembly,
    CheckpointStatus,
    Claim,
    Member,
    News,
    Outcome,
    Refusal,
    Waiting,
    format_ranks,
)
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security.admission import printable
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

_MOST_LOST = 1024  # lost members that a claim names; the leases of further lost members expire

# By process id and member id: the session of this process's first claim, which its later claims use too.
_sessions: dict[tuple[int, str], bytes] = {}


def register(
    address: str,
    member: Member,
    *,
    size: int | None,
    secret: Secret,
    job: str | None,
    timeout: float,
    generation: int = 0,
    run: bytes = b"",
    lost: Sequence[str] = (),
    lacks_state: bool = False,
    stood_still: bool = False,
    transport: str = "",
    credentials: Credentials | None = None,
    waiting: Callable[[str], None] | None = None,
    seal: WorkerSeal | None = None,
    log_after: float = 5.0,
    logger: logging.Logger = log,
) -> Assembly:
    """Register at the coordinator and wait for the next generation.

    `secret` is the job's secret or a join token, here and below. `generation` is the last generation that this member
    was in (0: a newcomer), `run` is the run of that generation, and `lost` are the ids of its members that this member
    could not reach. `transport` is what this member can use to exchange data, empty if it brings its own data plane.
    While the member waits, `waiting` is called with the reason whenever the reason changes. The reason is logged after
    `log_after` seconds with `logger`, and again each time the waiting time has doubled. A caller that registers again
    passes the same `seal`, so that the coordinator is already authenticated.

    Raise `NoConnection` if there is no answer, `Refused` with the coordinator's reason, `Timeout` naming the ranks that
    did not register, and `ConfigError` for an invalid address. A call that fails gives up the member's place.
    """
    if size is not None and size < 1:
        raise InvalidSize(f"a job has at least one rank, not {size}")
    session = _session(member.id, generation)
    claim = Claim(
        member,
        size,
        job,
        session,
        generation=generation,
        lost=tuple(lost)[:_MOST_LOST],
        lacks_state=lacks_state,
        stood_still=stood_still,
        run=run,
        version=_version(),
        transport=transport,
    )
    largest_reply = BYTES_PER_MEMBER * ((size or LARGEST_JOB) + 64)
    with CoordinatorSession(
        address, secret, timeout, seal=seal, credentials=credentials, largest_reply=largest_reply
    ) as coordinator:
        try:
            return _wait_for_all(coordinator, claim, waiting, log_after, logger)
        except NoConnection:  # or `Refused`: there is no place to give up, or no coordinator that could be informed
            raise
        except BaseException:
            coordinator.set_time_left(1.0)
            with contextlib.suppress(Exception):
                _unregister(coordinator, member, run=run)
            raise


def unregister(
    address: str,
    member: Member,
    *,
    secret: Secret,
    finished: bool = False,
    run: bytes = b"",
    timeout: float = 5.0,
    credentials: Credentials | None = None,
) -> bool:
    """Leave `run`. With `finished`, also report that all work of the job is done.

    Return False if the coordinator does not know this member.
    """
    with CoordinatorSession(address, secret, timeout, credentials=credentials) as coordinator:
        return _unregister(coordinator, member, finished, run)


def heartbeat(
    address: str,
    ids: Iterable[str],
    *,
    secret: Secret,
    gone: Iterable[str] = (),
    run: bytes = b"",
    timeout: float = 5.0,
    credentials: Credentials | None = None,
    seal: WorkerSeal | None = None,
) -> News:
    """Report that the members `ids` of `run` are alive and those in `gone` are not, and return the coordinator's news.

    A frequent caller passes the same `seal` each time, because the coordinator stores a sequence number for each seal.
    """
    request = pb.HeartbeatRequest(ids=ids, gone=gone, run=run)
    with CoordinatorSession(address, secret, timeout, credentials=credentials, seal=seal) as coordinator:
        reply = _answer(coordinator, pb.News, "Heartbeat", request.SerializeToString())
    return news_from_wire(reply)


def serving(address: str, *, secret: Secret, timeout: float = 5.0, credentials: Credentials | None = None) -> bool:
    """Return whether the coordinator answers, holds the secret, and reports that it serves (`grpc.health.v1`)."""
    with CoordinatorSession(address, secret, timeout, credentials=credentials) as coordinator:
        return coordinator.serving()


def start_checkpoint(
    address: str,
    id: str,
    epoch: int,
    *,
    secret: Secret,
    timeout: float = 5.0,
    credentials: Credentials | None = None,
    seal: WorkerSeal | None = None,
) -> CheckpointStatus:
    """Begin the checkpoint of an epoch, or return the progress of one that has begun.

    The other members are informed with the reply to their next heartbeat.
    """
    return _checkpoint("StartCheckpoint", address, id, epoch, secret, timeout, credentials, seal)


def end_checkpoint(
    address: str,
    id: str,
    epoch: int,
    *,
    secret: Secret,
    timeout: float = 5.0,
    credentials: Credentials | None = None,
    seal: WorkerSeal | None = None,
) -> CheckpointStatus:
    """Report that this member's part is saved. Repeat the call to poll whether all members have reported."""
    return _checkpoint("EndCheckpoint", address, id, epoch, secret, timeout, credentials, seal)


def _checkpoint(
    method: str,
    address: str,
    id: str,
    epoch: int,
    secret: Secret,
    timeout: float,
    credentials: Credentials | None,
    seal: WorkerSeal | None,
) -> CheckpointStatus:
    request = pb.CheckpointRequest(id=id, epoch=epoch)
    with CoordinatorSession(address, secret, timeout, credentials=credentials, seal=seal) as coordinator:
        reply = _answer(coordinator, pb.CheckpointReply, method, request.SerializeToString())
        outcome = reply.WhichOneof("outcome")
        if outcome is None:
            raise other_version(coordinator.address)
        if outcome == "refusal":
            raise Refused(f"the coordinator at {address} refused the checkpoint: {reply.refusal.reason}")
    return checkpoint_from_wire(reply.checkpoint)


def _session(id: str, generation: int) -> bytes:
    key = (os.getpid(), id)
    if generation == 0 or key not in _sessions:
        _sessions[key] = secrets.token_bytes(SESSION_BYTES)
    return _sessions[key]


def _version() -> str:
    """Return the version of the installed gradwire; empty if it is not installed as a package."""
    from importlib import metadata

    try:
        return metadata.version("gradwire")
    except metadata.PackageNotFoundError:
        return ""


def _unregister(coordinator: CoordinatorSession, member: Member, finished: bool = False, run: bytes = b"") -> bool:
    request = pb.UnregisterWorkerRequest(member=member_to_wire(member), finished=finished, run=run)
    return _answer(coordinator, pb.UnregisterWorkerReply, "UnregisterWorker", request.SerializeToString()).known


def _wait_for_all(
    coordinator: CoordinatorSession,
    claim: Claim,
    waiting: Callable[[str], None] | None,
    log_after: float,
    logger: logging.Logger,
) -> Assembly:
    request = claim_to_wire(claim)
    start, last_reason = time.monotonic(), ""
    while True:
        request.wait_ms = max(0, round(1000 * min(HOLD_SECONDS, coordinator.left)))
        reply = _answer(coordinator, pb.RegisterWorkerReply, "RegisterWorker", request.SerializeToString())
        assembly = accepted(claim, _outcome(coordinator, reply), coordinator.address)
        if isinstance(assembly, Assembly):
            return assembly
        reason = _reason(reply.waiting, request.size)
        if waiting is not None and reason != last_reason:
            waiting(reason)
            last_reason = reason
        waited = time.monotonic() - start
        if coordinator.left <= 0:
            raise Timeout(
                f"the rendezvous at {coordinator.address} was not complete within {coordinator.timeout:g} s: {reason}",
                operation="rendezvous",
                seconds=coordinator.timeout,
            )
        if waited >= log_after:
            if is_lowest_present(claim.member.rank, reply.waiting):  # one line for all ranks that wait
                logger.warning("waited %.0f s at the rendezvous %s: %s", waited, coordinator.address, reason)
            log_after *= 2
        time.sleep(max(0.0, min(reply.waiting.again_after_ms / 1000, coordinator.left)))


def is_lowest_present(rank: int | None, waiting: pb.Waiting) -> bool:
    """Whether no lower rank waits too, as far as the reply shows: it lists the missing ranks, or the lowest of them."""
    missing = set(waiting.missing)
    if rank is None or not missing:
        return True
    is_cut_off = waiting.missing_count > len(missing)
    return missing.issuperset(range(min(rank, max(missing) + 1) if is_cut_off else rank))


def _reason(waiting: pb.Waiting, size: int) -> str:
    if size and waiting.missing_count:
        return f"missing {format_ranks(waiting.missing, waiting.missing_count)} of {size}"
    return printable(waiting.reason) or "other members are missing"


def _answer(coordinator: CoordinatorSession, kind: type[M], method: str, body: bytes) -> M:
    try:
        return parse(kind, coordinator.ask(method, body))
    except Malformed as error:
        raise other_version(coordinator.address) from error


def _outcome(coordinator: CoordinatorSession, reply: pb.RegisterWorkerReply) -> Outcome:
    match reply.WhichOneof("outcome"):
        case "waiting":
            return Waiting(tuple(reply.waiting.missing), reply.waiting.reason)
        case "refusal":
            return Refusal(reply.refusal.reason, reply.refusal.finished, reply.refusal.other_run)
        case "assembly":
            try:
                key = reply.assembly.link_key
                return assembly_from_wire(reply.assembly, coordinator.seal.unwrap_key(key) if key else None)
            except (Malformed, ValueError) as error:
                raise other_version(coordinator.address) from error
    raise other_version(coordinator.address)
