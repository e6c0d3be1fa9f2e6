"""A worker's requests to the coordinator: register, leave, heartbeat, checkpoint.

Each is one short conversation. Nothing of gRPC is held between two of them: a process that trains may fork at any time.
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
    SESSION,
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
    named,
)
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security.admission import printable
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

_MOST_LOST = 1024  # members that one can complain of; the leases of others, if lost, run out

# By process and id: the session under which this process registered, which later generations are asked for under too.
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
    stranger: bool = False,
    stood_still: bool = False,
    transport: str = "",
    credentials: Credentials | None = None,
    waiting: Callable[[str], None] | None = None,
    seal: WorkerSeal | None = None,
    log_after: float = 5.0,
) -> Assembly:
    """Register at the coordinator and wait for the next generation.

    `secret` is the job's, here and below, or a join token. `generation` is the last one that this member was in (0: a
    newcomer), `run` its run, and `lost` the ids of its members that this one could not reach. `transport` is what this
    member can use to exchange data with others, empty if it brings its own data plane. While it waits, `waiting` is
    called with the reason, whenever that changes; after `log_after` seconds, and then after twice that time each, it is
    logged. A caller that registers again passes the same `seal`: then the two have met.

    Raises `NoConnection` if nobody answers, `Refused` with the coordinator's reason, `Timeout` naming the ranks that
    did not come, and `ConfigError` for an address that cannot be. Whoever fails gives its place back.
    """
    if size is not None and size < 1:
        raise InvalidSize(f"a job has at least one rank, not {size}")
    session = _session(member.id, generation)
    complaints = tuple(lost)[:_MOST_LOST]
    claim = Claim(
        member,
        size,
        job,
        session,
        generation=generation,
        lost=complaints,
        stranger=stranger,
        stood_still=stood_still,
        run=run,
        version=_version(),
        transport=transport,
    )
    room = BYTES_PER_MEMBER * ((size or LARGEST_JOB) + 64)
    with CoordinatorSession(
        address, secret, timeout, seal=seal, credentials=credentials, largest_reply=room
    ) as coordinator:
        try:
            return _wait_for_all(coordinator, claim, waiting, log_after)
        except NoConnection:  # also when refused: there is no place to give back, or nobody to give it to
            raise
        except BaseException:
            coordinator.hurry(1.0)
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
    """Take leave of `run`, also for good if all work is `finished`; False if the coordinator knows no such member."""
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
    """Say that the members `ids` of `run` live and those in `gone` do not, and hear what all should know.

    Whoever does so often keeps a `seal` for it: the coordinator remembers each of them.
    """
    request = pb.HeartbeatRequest(ids=ids, gone=gone, run=run)
    with CoordinatorSession(address, secret, timeout, credentials=credentials, seal=seal) as coordinator:
        reply = _answer(coordinator, pb.News, "Heartbeat", request.SerializeToString())
    return news_from_wire(reply)


def serving(address: str, *, secret: Secret, timeout: float = 5.0, credentials: Credentials | None = None) -> bool:
    """Whether the coordinator is there, holds the secret, and says that it serves (`grpc.health.v1`)."""
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
    """Begin the checkpoint of an epoch, of which the others hear with their next heartbeat, or learn how far it is."""
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
    """Report that this member's part is saved. May be repeated, to learn whether all have reported."""
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
        _sessions[key] = secrets.token_bytes(SESSION)
    return _sessions[key]


def _version() -> str:
    """Of gradwire as it is installed; empty if it is not."""
    from importlib import metadata

    try:
        return metadata.version("gradwire")
    except metadata.PackageNotFoundError:
        return ""


def _unregister(coordinator: CoordinatorSession, member: Member, finished: bool = False, run: bytes = b"") -> bool:
    request = pb.UnregisterWorkerRequest(member=member_to_wire(member), finished=finished, run=run)
    return _answer(coordinator, pb.UnregisterWorkerReply, "UnregisterWorker", request.SerializeToString()).known


def _wait_for_all(
    coordinator: CoordinatorSession, claim: Claim, tell: Callable[[str], None] | None, log_after: float
) -> Assembly:
    request = claim_to_wire(claim)
    start, told = time.monotonic(), ""
    while True:
        request.patience_ms = max(0, round(1000 * min(HOLD_SECONDS, coordinator.left)))
        reply = _answer(coordinator, pb.RegisterWorkerReply, "RegisterWorker", request.SerializeToString())
        assembly = accepted(claim, _outcome(coordinator, reply), coordinator.address)
        if isinstance(assembly, Assembly):
            return assembly
        reason = _reason(reply.waiting, request.size, "have not come")
        if tell is not None and reason != told:
            tell(reason)
            told = reason
        waited = time.monotonic() - start
        if coordinator.left <= 0:
            raise Timeout(
                f"the job did not come together at {coordinator.address} within {coordinator.timeout:g} s: "
                + _reason(reply.waiting, request.size, "did not come"),
                operation="rendezvous",
                seconds=coordinator.timeout,
            )
        if waited >= log_after:
            if is_lowest_present(claim.member.rank, reply.waiting):  # one line for all ranks that wait
                log.warning("%.0f s at the rendezvous %s: %s", waited, coordinator.address, reason)
            log_after *= 2
        time.sleep(max(0.0, min(reply.waiting.again_after_ms / 1000, coordinator.left)))


def is_lowest_present(rank: int | None, waiting: pb.Waiting) -> bool:
    """Whether no lower rank waits too, as far as the reply shows: it lists the missing ranks, or the lowest of them."""
    missing = set(waiting.missing)
    if rank is None or not missing:
        return True
    is_cut_off = waiting.missing_count > len(missing)
    return missing.issuperset(range(min(rank, max(missing) + 1) if is_cut_off else rank))


def _reason(waiting: pb.Waiting, size: int, verb: str) -> str:
    if size and waiting.missing_count:
        return f"of {size}, {named(waiting.missing, waiting.missing_count)} {verb}"
    return printable(waiting.reason) or "others are missing"


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
                return assembly_from_wire(reply.assembly, coordinator.seal.unveil(key) if key else None)
            except (Malformed, ValueError) as error:
                raise other_version(coordinator.address) from error
    raise other_version(coordinator.address)
