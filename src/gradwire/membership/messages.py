"""Between the protocol's messages and our own types. Whatever does not make sense raises `Malformed`."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradwire.membership.members import Assembly, Member
from gradwire.membership.state import Outcome, Refusal, Waiting
from gradwire.membership.v1 import gradwire_pb2 as pb

_MISSING_LISTED = 64  # ranks that a reply names; a count tells of the rest

M = TypeVar("M", bound=Message)


class Malformed(Exception):
    """Proven to come from a holder of the secret, and yet not a message of this protocol: another version, perhaps."""


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
    )


def member_from_wire(message: pb.Member) -> Member:
    rank = message.rank if message.HasField("rank") else None
    return Member(message.id, rank, message.host, message.hostname, message.pid, message.address)


def outcome_to_wire(outcome: Outcome, again_after: float) -> pb.RegisterWorkerReply:
    reply = pb.RegisterWorkerReply()
    if isinstance(outcome, Waiting):
        reply.waiting.missing.extend(outcome.missing[:_MISSING_LISTED])
        reply.waiting.missing_count = len(outcome.missing)
        reply.waiting.again_after_ms = round(again_after * 1000)
    elif isinstance(outcome, Refusal):
        reply.refusal.reason = outcome.reason
    else:
        assembly = reply.assembly
        assembly.job, assembly.run = outcome.job, outcome.run
        assembly.generation, assembly.rank = outcome.generation, outcome.rank
        assembly.members.extend(map(member_to_wire, outcome.members))
    return reply


def assembly_from_wire(message: pb.Assembly, size: int) -> Assembly:
    members = tuple(map(member_from_wire, message.members))
    in_order = [member.rank for member in members] == list(range(size))
    if not in_order or not 0 <= message.rank < size or len(message.run) != 16:
        raise Malformed("an assembly that does not hold together")
    return Assembly(message.job, message.generation, message.rank, members, message.run)
