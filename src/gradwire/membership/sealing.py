"""Proofs of the job's secret on every message between a worker and the coordinator (see v1/gradwire.proto).

Pure. Each side makes one nonce; every proof binds both, the direction, the method, a sequence number that only grows,
and the whole body. So nothing can be replayed to either side, and no reply passes for the answer to another call.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import OrderedDict

from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security.secret import derive
from gradwire.security.tokens import LONGEST_TICKET, Token, key_of, wrapped

NONCE = 32
# Workers that proved the secret, of which the last sequence is remembered; strangers are never remembered.
_REMEMBERED = 1 << 17


class Unproven(Exception):
    """A message does not prove the secret, or was heard before."""


class Stale(Exception):
    """A message is meant for an earlier coordinator at this address."""


class WorkerSeal:
    """The worker's side of all proofs, for one conversation; it holds the job's secret or a join token."""

    def __init__(self, secret: bytes | Token) -> None:
        self._ticket, self._secret = (secret.ticket, secret.key) if isinstance(secret, Token) else (b"", secret)
        self._key = _membership_key(self._secret)
        self._nonce = secrets.token_bytes(NONCE)
        self._coordinator_nonce = b""
        self._sequence = 0
        self._lock = threading.Lock()
        self.acquainted = False  # a coordinator has proved itself at some time, whether or not it is still there

    @property
    def met(self) -> bool:
        """Whether a coordinator has proved itself, of which no restart is known."""
        return bool(self._coordinator_nonce)

    def part(self) -> None:
        """The coordinator that was met is no more."""
        self._coordinator_nonce = b""

    def hello(self) -> pb.HelloRequest:
        proof = derive(self._key, "hello worker", self._nonce)
        return pb.HelloRequest(worker_nonce=self._nonce, proof=proof, ticket=self._ticket)

    def meet(self, reply: pb.HelloReply) -> None:
        """Believe a coordinator that proves the secret; `Unproven` otherwise."""
        expected = derive(self._key, "hello coordinator", self._nonce, reply.coordinator_nonce)
        if len(reply.coordinator_nonce) != NONCE or not hmac.compare_digest(reply.proof, expected):
            raise Unproven
        self._coordinator_nonce = reply.coordinator_nonce
        self.acquainted = True

    def seal(self, method: str, body: bytes) -> pb.Sealed:
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
        message = pb.Sealed(
            worker_nonce=self._nonce,
            coordinator_nonce=self._coordinator_nonce,
            sequence=sequence,
            body=body,
            ticket=self._ticket,
        )
        message.proof = _proof(self._key, "request", method, message)
        return message

    def open(self, method: str, request: pb.Sealed, reply: pb.Sealed) -> bytes:
        """The body of a reply to exactly this request; `Unproven` if it is anything else."""
        if _binding(reply) != _binding(request):
            raise Unproven
        if not hmac.compare_digest(reply.proof, _proof(self._key, "reply", method, reply)):
            raise Unproven
        return reply.body

    def unveil(self, hidden: bytes) -> bytes:
        """A key that the reply to the last request handed over."""
        return wrapped(hidden, self._secret, self._nonce, self._coordinator_nonce, self._sequence.to_bytes(8, "big"))


class CoordinatorSeal:
    """The coordinator's side of all proofs, for one start of it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._key = _membership_key(secret)
        self._nonce = secrets.token_bytes(NONCE)
        self._heard: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def remembered(self) -> int:
        """How many workers' last sequence numbers it holds."""
        return len(self._heard)

    def meet(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Answer a worker that proves the secret; `Unproven` otherwise, and strangers get no proof to guess from."""
        key = self._key_for(request.ticket)
        expected = derive(key, "hello worker", request.worker_nonce)
        if len(request.worker_nonce) != NONCE or not hmac.compare_digest(request.proof, expected):
            raise Unproven
        proof = derive(key, "hello coordinator", request.worker_nonce, self._nonce)
        return pb.HelloReply(coordinator_nonce=self._nonce, proof=proof)

    def open(self, method: str, request: pb.Sealed) -> bytes:
        """The body of a request, proven and heard for the first time."""
        if len(request.worker_nonce) != NONCE:
            raise Unproven
        if not hmac.compare_digest(request.proof, _proof(self._key_for(request.ticket), "request", method, request)):
            raise Unproven
        if request.coordinator_nonce != self._nonce:
            raise Stale
        with self._lock:
            if request.sequence <= self._heard.get(request.worker_nonce, 0):
                raise Unproven
            self._heard[request.worker_nonce] = request.sequence
            self._heard.move_to_end(request.worker_nonce)
            if len(self._heard) > _REMEMBERED:
                self._heard.popitem(last=False)
        return request.body

    def seal(self, method: str, request: pb.Sealed, body: bytes) -> pb.Sealed:
        reply = pb.Sealed(
            worker_nonce=request.worker_nonce, coordinator_nonce=self._nonce, sequence=request.sequence, body=body
        )
        reply.proof = _proof(self._key_for(request.ticket), "reply", method, reply)
        return reply

    def veil(self, key: bytes, request: pb.Sealed) -> bytes:
        """A key to hand over in the reply to the holder of a join token."""
        over = key_of(self._secret, request.ticket)
        return wrapped(key, over, request.worker_nonce, self._nonce, request.sequence.to_bytes(8, "big"))

    def link_key(self, run: bytes) -> bytes:
        """The key of all links of a run."""
        return derive(self._secret, "links", run)

    def _key_for(self, ticket: bytes) -> bytes:
        if not ticket:
            return self._key
        if len(ticket) > LONGEST_TICKET:
            raise Unproven
        return _membership_key(key_of(self._secret, ticket))


def _membership_key(secret: bytes) -> bytes:
    return derive(secret, "membership v1")


def _binding(message: pb.Sealed) -> tuple[bytes, bytes, int]:
    return message.worker_nonce, message.coordinator_nonce, message.sequence


def _proof(key: bytes, direction: str, method: str, message: pb.Sealed) -> bytes:
    sequence = message.sequence.to_bytes(8, "big")
    parts = (method.encode(), message.worker_nonce, message.coordinator_nonce, sequence, message.body)
    return derive(key, direction, *parts)
