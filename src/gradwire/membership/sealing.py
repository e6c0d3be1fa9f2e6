"""Makes and checks the proof of the job's secret on every message between a worker and the coordinator.

The protocol is described in v1/gradwire.proto. This module does no I/O. Each side creates one nonce. Every proof binds
both nonces, the direction, the method, an increasing sequence number and the whole body. So no message can be replayed
to either side, and no reply can be taken for the reply to another call.
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
# For how many workers the last sequence number is stored. Only senders that have proved the secret are stored.
_MOST_REMEMBERED = 1 << 17


class Unproven(Exception):
    """A message does not prove the secret, or was already received."""


class Stale(Exception):
    """A message was addressed to an earlier coordinator at this address."""


class WorkerSeal:
    """The worker's side of all proofs, for one conversation. It uses the job's secret or a join token."""

    def __init__(self, secret: bytes | Token) -> None:
        self._ticket, self._secret = (secret.ticket, secret.key) if isinstance(secret, Token) else (b"", secret)
        self._key = _membership_key(self._secret)
        self._nonce = secrets.token_bytes(NONCE)
        self._coordinator_nonce = b""
        self._sequence = 0
        self._lock = threading.Lock()
        self.ever_authenticated = False  # a coordinator has proved the secret at least once; it may be gone by now

    @property
    def authenticated(self) -> bool:
        """Whether the current coordinator has proved the secret."""
        return bool(self._coordinator_nonce)

    def forget_coordinator(self) -> None:
        """Require a new proof: the coordinator that was authenticated may have been replaced."""
        self._coordinator_nonce = b""

    def hello(self) -> pb.HelloRequest:
        proof = derive(self._key, "hello worker", self._nonce)
        return pb.HelloRequest(worker_nonce=self._nonce, proof=proof, ticket=self._ticket)

    def accept_hello(self, reply: pb.HelloReply) -> None:
        """Check the coordinator's proof of the secret. Raise `Unproven` if it is wrong."""
        expected = derive(self._key, "hello coordinator", self._nonce, reply.coordinator_nonce)
        if len(reply.coordinator_nonce) != NONCE or not hmac.compare_digest(reply.proof, expected):
            raise Unproven
        self._coordinator_nonce = reply.coordinator_nonce
        self.ever_authenticated = True

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
        """Return the body of the reply to this request. Raise `Unproven` if it is not a proven reply to it."""
        if _binding(reply) != _binding(request):
            raise Unproven
        if not hmac.compare_digest(reply.proof, _proof(self._key, "reply", method, reply)):
            raise Unproven
        return reply.body

    def unwrap_key(self, encrypted: bytes) -> bytes:
        """Decrypt a key that came with the reply to the last request."""
        return wrapped(encrypted, self._secret, self._nonce, self._coordinator_nonce, self._sequence.to_bytes(8, "big"))


class CoordinatorSeal:
    """The coordinator's side of all proofs, for one start of the coordinator."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._key = _membership_key(secret)
        self._nonce = secrets.token_bytes(NONCE)
        self._last_sequence: OrderedDict[bytes, int] = OrderedDict()  # by worker nonce
        self._lock = threading.Lock()

    @property
    def remembered(self) -> int:
        """The number of workers whose last sequence number is stored."""
        return len(self._last_sequence)

    def answer_hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return a proof for a worker that proves the secret. Raise `Unproven` otherwise.

        A caller without the secret receives no proof, because the secret could be guessed from one.
        """
        key = self._key_for(request.ticket)
        expected = derive(key, "hello worker", request.worker_nonce)
        if len(request.worker_nonce) != NONCE or not hmac.compare_digest(request.proof, expected):
            raise Unproven
        proof = derive(key, "hello coordinator", request.worker_nonce, self._nonce)
        return pb.HelloReply(coordinator_nonce=self._nonce, proof=proof)

    def open(self, method: str, request: pb.Sealed) -> bytes:
        """Return the body of a request. Raise `Unproven` if it is not proven or was already received, or `Stale`."""
        if len(request.worker_nonce) != NONCE:
            raise Unproven
        if not hmac.compare_digest(request.proof, _proof(self._key_for(request.ticket), "request", method, request)):
            raise Unproven
        if request.coordinator_nonce != self._nonce:
            raise Stale
        with self._lock:
            if request.sequence <= self._last_sequence.get(request.worker_nonce, 0):
                raise Unproven
            self._last_sequence[request.worker_nonce] = request.sequence
            self._last_sequence.move_to_end(request.worker_nonce)
            if len(self._last_sequence) > _MOST_REMEMBERED:
                self._last_sequence.popitem(last=False)
        return request.body

    def seal(self, method: str, request: pb.Sealed, body: bytes) -> pb.Sealed:
        reply = pb.Sealed(
            worker_nonce=request.worker_nonce, coordinator_nonce=self._nonce, sequence=request.sequence, body=body
        )
        reply.proof = _proof(self._key_for(request.ticket), "reply", method, reply)
        return reply

    def wrap_key(self, key: bytes, request: pb.Sealed) -> bytes:
        """Encrypt a key for the reply to the holder of a join token."""
        over = key_of(self._secret, request.ticket)
        return wrapped(key, over, request.worker_nonce, self._nonce, request.sequence.to_bytes(8, "big"))

    def link_key(self, run: bytes) -> bytes:
        """Return the key of all links of a run."""
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
