from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Assembly(_message.Message):
    __slots__ = ["generation", "job", "lease_ms", "link_key", "members", "previous_run", "rank", "run"]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LINK_KEY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    job: str
    lease_ms: int
    link_key: bytes
    members: _containers.RepeatedCompositeFieldContainer[Member]
    previous_run: bytes
    rank: int
    run: bytes
    def __init__(self, job: _Optional[str] = ..., run: _Optional[bytes] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., link_key: _Optional[bytes] = ..., previous_run: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ["complete", "epoch", "waiting_count", "waiting_for"]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    epoch: int
    waiting_count: int
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., complete: bool = ..., waiting_for: _Optional[_Iterable[str]] = ..., waiting_count: _Optional[int] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ["checkpoint", "refusal"]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    refusal: Refusal
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ["epoch", "id"]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    id: str
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ["gone", "ids", "run"]
    GONE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedScalarFieldContainer[str]
    run: bytes
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., gone: _Optional[_Iterable[str]] = ..., run: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ["coordinator_nonce", "proof"]
    COORDINATOR_NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    coordinator_nonce: bytes
    proof: bytes
    def __init__(self, coordinator_nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ["proof", "ticket", "worker_nonce"]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WORKER_NONCE_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    ticket: bytes
    worker_nonce: bytes
    def __init__(self, worker_nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ["address", "host", "hostname", "id", "pid", "rank", "started"]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    address: str
    host: str
    hostname: str
    id: str
    pid: int
    rank: int
    started: int
    def __init__(self, id: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., hostname: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., started: _Optional[int] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ["checkpoint", "evicted", "finished", "generation", "joiners", "lease_ms", "over", "run", "size", "unknown"]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    evicted: _containers.RepeatedScalarFieldContainer[str]
    finished: bool
    generation: int
    joiners: int
    lease_ms: int
    over: bool
    run: bytes
    size: int
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., joiners: _Optional[int] = ..., evicted: _Optional[_Iterable[str]] = ..., checkpoint: _Optional[int] = ..., over: bool = ..., size: _Optional[int] = ..., finished: bool = ..., run: _Optional[bytes] = ..., unknown: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ["finished", "other_run", "reason"]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    OTHER_RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    other_run: bool
    reason: str
    def __init__(self, reason: _Optional[str] = ..., finished: bool = ..., other_run: bool = ...) -> None: ...

class RegisterWorkerReply(_message.Message):
    __slots__ = ["assembly", "refusal", "waiting"]
    ASSEMBLY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    assembly: Assembly
    refusal: Refusal
    waiting: Waiting
    def __init__(self, waiting: _Optional[_Union[Waiting, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., assembly: _Optional[_Union[Assembly, _Mapping]] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ["generation", "job", "lacks_state", "lost", "member", "protocol", "run", "session", "size", "stood_still", "transport", "version", "wait_ms"]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LACKS_STATE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STOOD_STILL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    job: str
    lacks_state: bool
    lost: _containers.RepeatedScalarFieldContainer[str]
    member: Member
    protocol: int
    run: bytes
    session: bytes
    size: int
    stood_still: bool
    transport: str
    version: str
    wait_ms: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., size: _Optional[int] = ..., job: _Optional[str] = ..., wait_ms: _Optional[int] = ..., generation: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., session: _Optional[bytes] = ..., lacks_state: bool = ..., stood_still: bool = ..., run: _Optional[bytes] = ..., protocol: _Optional[int] = ..., version: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ["body", "coordinator_nonce", "proof", "sequence", "ticket", "worker_nonce"]
    BODY_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WORKER_NONCE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    coordinator_nonce: bytes
    proof: bytes
    sequence: int
    ticket: bytes
    worker_nonce: bytes
    def __init__(self, worker_nonce: _Optional[bytes] = ..., coordinator_nonce: _Optional[bytes] = ..., sequence: _Optional[int] = ..., body: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class UnregisterWorkerReply(_message.Message):
    __slots__ = ["known"]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class UnregisterWorkerRequest(_message.Message):
    __slots__ = ["finished", "member", "run"]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    member: Member
    run: bytes
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., finished: bool = ..., run: _Optional[bytes] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ["again_after_ms", "missing", "missing_count", "reason"]
    AGAIN_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    again_after_ms: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    missing_count: int
    reason: str
    def __init__(self, missing: _Optional[_Iterable[int]] = ..., missing_count: _Optional[int] = ..., again_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
