"""Converts between the protocol's messages and the types of `membership.types`. Invalid messages raise `Malformed`."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradwire.membership.types import Assembly, CheckpointStatus, Claim, Member, News, Outcome, Refusal, Waiting
from gradwire.membership.v1 import gradwire_pb2 as pb

_MOST_LISTED = 64  # missing ranks or members that a reply lists; a count field gives the total

SESSION_BYTES = 16  # bytes

M = TypeVar("M", bound=Message)


class Malformed(Exception):
    """The sender has proved the secret, but the message is not of this protocol. It may have another version."""


def parse(kind: type[M], body: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Malformed(f"not a {kind.__name__}") from error
    return message


def member_to_wire(member: Member) -> pb.Member:
    return pb.Member(
        id=member.id,
        rank=member.rank,
        host=member.host,
        hostname=member.hostname,
        pid=member.pid,
        address=member.address,
        started=member.started,
    )


def member_from_wire(message: pb.Member) -> Member:
    rank = message.rank if message.HasField("rank") else None
    return Member(message.id, rank, message.host, message.hostname, message.pid, message.address, message.started)


def claim_to_wire(claim: Claim) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(
        member=member_to_wire(claim.member),
        size=claim.size or 0,
        job=claim.job or "",
        generation=claim.generation,
        lost=claim.lost,
        session=claim.session,
        lacks_state=claim.lacks_state,
        stood_still=claim.stood_still,
        run=claim.run,
        protocol=claim.protocol,
        version=claim.version,
        transport=claim.transport,
    )


def claim_from_wire(message: pb.RegisterWorkerRequest, sequence: int) -> Claim:
    if len(message.session) != SESSION_BYTES:
        raise Malformed(f"a session is {SESSION_BYTES} bytes, not {len(message.session)}")
    return Claim(
        member=member_from_wire(message.member),
        size=message.size or None,
        job=message.job or None,
        session=message.session,
        sequence=sequence,
        generation=message.generation,
        lost=tuple(message.lost),
        lacks_state=message.lacks_state,
        stood_still=message.stood_still,
        run=message.run,
        protocol=message.protocol,
        version=message.version,
        transport=message.transport,
    )


class ReplyEncoder:
    """Encodes replies to RegisterWorker.

    The list of members is encoded once per generation and cached: thousands of members may each receive the whole list.
    """

    def __init__(self) -> None:
        self._cached: tuple[tuple[Member, ...], bytes] = ((), b"")

    def encode(self, outcome: Outcome, again_after: float = 0.0, link_key: bytes = b"") -> bytes:
        reply = pb.RegisterWorkerReply()
        if isinstance(outcome, Waiting):
            reply.waiting.missing.extend(outcome.missing[:_MOST_LISTED])
            reply.waiting.missing_count = len(outcome.missing)
            reply.waiting.again_after_ms = round(again_after * 1000)
            reply.waiting.reason = outcome.reason
        elif isinstance(outcome, Refusal):
            reply.refusal.reason, reply.refusal.finished = outcome.reason, outcome.finished
            reply.refusal.other_run = outcome.other_run
        else:
            assembly = reply.assembly
            assembly.job, assembly.run = outcome.job, outcome.run
            assembly.generation, assembly.rank, assembly.link_key = outcome.generation, outcome.rank, link_key
            assembly.previous_run = outcome.previous_run
            assembly.lease_ms = round(outcome.lease * 1000)
            # Protobuf parses two concatenated encodings as one message that has the fields of both.
            return self._members(outcome.members) + reply.SerializeToString()
        return reply.SerializeToString()

    def _members(self, members: tuple[Member, ...]) -> bytes:
        cached, encoded = self._cached
        if cached is not members:
            assembly = pb.Assembly(members=map(member_to_wire, members))
            encoded = pb.RegisterWorkerReply(assembly=assembly).SerializeToString()
            self._cached = (members, encoded)
        return encoded


def assembly_from_wire(message: pb.Assembly, link_key: bytes | None) -> Assembly:
    members = tuple(map(member_from_wire, message.members))
    in_order = [member.rank for member in members] == list(range(len(members)))
    if not in_order or not 0 <= message.rank < len(members) or len(message.run) != 16:
        raise Malformed("an assembly whose ranks or run id are invalid")
    return Assembly(
        message.job,
        message.generation,
        message.rank,
        members,
        message.run,
        link_key,
        message.previous_run,
        message.lease_ms / 1000,
    )


def news_to_wire(news: News) -> pb.News:
    return pb.News(
        generation=news.generation,
        joiners=news.joiners,
        evicted=news.evicted,
        checkpoint=news.checkpoint,
        over=news.over,
        size=news.size,
        finished=news.finished,
        run=news.run,
        unknown=news.unknown,
        lease_ms=round(news.lease * 1000),
    )


def news_from_wire(message: pb.News) -> News:
    checkpoint = message.checkpoint if message.HasField("checkpoint") else None
    evicted = tuple(message.evicted)
    return News(
        message.generation,
        message.joiners,
        evicted,
        checkpoint,
        over=message.over,
        size=message.size,
        finished=message.finished,
        run=message.run,
        unknown=tuple(message.unknown),
        lease=message.lease_ms / 1000,
    )


def checkpoint_to_wire(outcome: CheckpointStatus | Refusal) -> pb.CheckpointReply:
    reply = pb.CheckpointReply()
    if isinstance(outcome, Refusal):
        reply.refusal.reason = outcome.reason
    else:
        reply.checkpoint.epoch, reply.checkpoint.complete = outcome.epoch, outcome.complete
        reply.checkpoint.waiting_for.extend(outcome.waiting_for[:_MOST_LISTED])
        reply.checkpoint.waiting_count = len(outcome.waiting_for)
    return reply


def checkpoint_from_wire(message: pb.Checkpoint) -> CheckpointStatus:
    return CheckpointStatus(message.epoch, tuple(message.waiting_for), message.complete)
