"""gradwire: distributed data-parallel training with bit-identical replicas.

Each layer imports only from the layers listed above it. The layers before `group` move bytes and detect failures,
`group` has the objects that users call, and the layers after it start processes and train. The docstring of a package
lists its own modules in the same order.

    errors        all errors that gradwire raises
    tracebacks    prints uncaught exceptions without the frames inside gradwire
    events        the tracing point: calls subscribers when a group's operations begin and end
    arrays        NumPy, DLPack and buffers as typed views; the table of dtypes
    wire          the message header and its fingerprint
    topology      which ranks share a host
    drive         runs protocols that are written as generators
    identity      the run, generation and rank that every message carries
    host          this machine: the native core, CPUs, memory
    collectives   algorithms as schedules, with their verifier and cost model
    security      the job's secret, certificates, join tokens, link admission
    transports    links between ranks: in one process, in shared memory, over TCP and TLS
    liveness      heartbeats, the log of calls, the verdict on which rank broke the group
    executors     run schedules, in Python or in the native core
    generation    a running generation: set-up, service thread, the failure path
    operations    the checks, exchanges and results of each collective
    group         `Group`, `Stream` and `Work`, the objects that users call
    membership    the coordinator and its clients
    job           configuration, the member session, `gw.init`
    launch        starting and supervising processes
    training      gradients, compression, elastic runs, state transfer
    torch         `DistributedDataParallel` and the backend of torch.distributed
    jax           trees of arrays for JAX
    simulate      whole jobs in virtual time, with faults chosen by a seed; a pytest fixture
    bench         `gradwire bench` and `gradwire tune`
    cli           the command line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradwire.errors import (
    Aborted,
    ArrayError,
    Broken,
    CheckpointError,
    Closed,
    CollectiveMismatch,
    ConfigError,
    Fenced,
    Finished,
    GradwireError,
    GroupTimeout,
    InvalidRank,
    InvalidSize,
    JournalError,
    NoConnection,
    NotFinite,
    OtherRun,
    PeerLost,
    Refused,
    ReplicasDiverged,
    SizeMismatch,
    StateLost,
    Timeout,
    TransportError,
    UnsupportedOp,
    WorkerFailed,
)
from gradwire.group import Capabilities, Group
from gradwire.group.receiving import Message
from gradwire.group.stream import Stream
from gradwire.group.work import Work
from gradwire.job.config import JobConfig
from gradwire.job.init import init, local_group, loopback_pair
from gradwire.launch.function import launch
from gradwire.security.credentials import Credentials
from gradwire.topology import Topology

if TYPE_CHECKING:
    from gradwire import jax as jax
    from gradwire import torch as torch
    from gradwire.job.worker_node import WorkerNode
    from gradwire.training.communicator import Communicator
    from gradwire.training.contract import Contract, broadcast_named, check_replicas
    from gradwire.training.elastic import Elastic, Step, elastic
    from gradwire.training.fence import Fence
    from gradwire.training.gradients import GradientSync
    from gradwire.training.sampler import Sampler
    from gradwire.training.weights import weighted_mean

__version__ = "0.2.0"

__all__ = [
    "Aborted",
    "ArrayError",
    "Broken",
    "Capabilities",
    "CheckpointError",
    "Closed",
    "CollectiveMismatch",
    "Communicator",
    "ConfigError",
    "Contract",
    "Credentials",
    "Elastic",
    "Fence",
    "Fenced",
    "Finished",
    "GradientSync",
    "GradwireError",
    "Group",
    "GroupTimeout",
    "InvalidRank",
    "InvalidSize",
    "JobConfig",
    "JournalError",
    "Message",
    "NoConnection",
    "NotFinite",
    "OtherRun",
    "PeerLost",
    "Refused",
    "ReplicasDiverged",
    "Sampler",
    "SizeMismatch",
    "StateLost",
    "Step",
    "Stream",
    "Timeout",
    "Topology",
    "TransportError",
    "UnsupportedOp",
    "Work",
    "WorkerFailed",
    "WorkerNode",
    "__version__",
    "broadcast_named",
    "check_replicas",
    "elastic",
    "init",
    "launch",
    "local_group",
    "loopback_pair",
    "weighted_mean",
]

# These names are imported on first use, because every process of a job pays the memory of the modules that it loads.
_FRAMEWORKS = ("jax", "torch")
_LAZY_MODULES = {
    "Communicator": "training.communicator",
    "Contract": "training.contract",
    "Elastic": "training.elastic",
    "Fence": "training.fence",
    "GradientSync": "training.gradients",
    "Sampler": "training.sampler",
    "Step": "training.elastic",
    "WorkerNode": "job.worker_node",
    "broadcast_named": "training.contract",
    "check_replicas": "training.contract",
    "elastic": "training.elastic",
    "weighted_mean": "training.weights",
}


if not TYPE_CHECKING:  # with a module-level __getattr__, a type checker would accept misspelt names

    def __getattr__(name: str) -> Any:
        if name in _FRAMEWORKS:
            return importlib.import_module(f"gradwire.{name}")
        if name not in _LAZY_MODULES:
            raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"gradwire.{_LAZY_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_FRAMEWORKS})
