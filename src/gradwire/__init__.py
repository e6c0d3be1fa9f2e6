"""gradwire: keeps many copies of a model in step.

The layers, each importing only from those above it:

    core            the native core, if it is there
    errors          everything that is raised
    events          where subscribers learn of a group's operations
    arrays          what users hand in, as typed views
    wire            the message header and its fingerprint
    topology        which ranks share a host
    identity        who a rank is, and among whom: what every message says
    machine         what this machine is, and what of it this process may use
    malloc          memory that a training step frees is kept for the next one
    collectives     algorithms as schedules; their verifier
    tuning          the table that algorithms are chosen by, in a file
    security        the job's secret, and who may open a link
    transports      links: in one process, over TCP; memory that ranks of a host share
    liveness        beats and who misses them, the log of calls, the verdict on what broke, what all tell all
    executors       carry schedules out
    messages        point-to-point messages, matched
    switchboard     the links that one thread serves for everybody
    generation      one membership at work: its beginning and end, the one failure path
    operations      what each collective checks, exchanges and returns
    work            handles and queues of asynchronous collectives
    plans           what a call comes down to: a schedule, and a rank's plan for it
    exchange        runs a group's operations in its one order
    post            send, recv and what is made of them
    group           what users call
    lifetime        what begins and ends with this process
    agreement       what ranks settle before the first call
    membership      who is in a job: rendezvous, generations, coordinator
    environments    one small file for each way of being started
    address         addresses as users write them
    config          who am I, where is the coordinator
    seat            a process's place in one generation after another
    threads         ranks as threads of one process
    job             init, local_group
    launch          starting and supervising processes
    training        what keeps replicas in step beyond the all-reduce
    torch           DDP's and torch.distributed's interfaces to groups and training
    jax             trees of arrays for JAX; loaded when it is first used
    simulate        whole jobs in virtual time, with faults by seed; a pytest fixture
    bench           `gradwire bench`: the collectives measured, in turns with other engines
    cli             the command line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradwire.errors import (
    Aborted,
    ArrayError,
    Broken,
    Closed,
    CollectiveMismatch,
    ConfigError,
    Fenced,
    Finished,
    GradwireError,
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
from gradwire.job import init, local_group, loopback_pair
from gradwire.launch.function import launch
from gradwire.topology import Topology
from gradwire.work import Stream, Work

if TYPE_CHECKING:
    from gradwire import jax as jax
    from gradwire import torch as torch
    from gradwire.membership.worker import WorkerNode
    from gradwire.training.contract import Contract, broadcast_named, check_replicas
    from gradwire.training.elastic import Elastic, Step, elastic
    from gradwire.training.fence import Fence
    from gradwire.training.gradients import GradientSync
    from gradwire.training.sampler import Sampler
    from gradwire.training.weights import weighted_mean

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "ArrayError",
    "Broken",
    "Capabilities",
    "Closed",
    "CollectiveMismatch",
    "ConfigError",
    "Contract",
    "Elastic",
    "Fence",
    "Fenced",
    "Finished",
    "GradientSync",
    "GradwireError",
    "Group",
    "InvalidRank",
    "InvalidSize",
    "JournalError",
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

# Loaded when somebody asks for it: each process of a job holds what it loads.
_FRAMEWORKS = ("jax", "torch")
_HOMES = {
    "Contract": "training.contract",
    "Elastic": "training.elastic",
    "Fence": "training.fence",
    "GradientSync": "training.gradients",
    "Sampler": "training.sampler",
    "Step": "training.elastic",
    "WorkerNode": "membership.worker",
    "broadcast_named": "training.contract",
    "check_replicas": "training.contract",
    "elastic": "training.elastic",
    "weighted_mean": "training.weights",
}


if not TYPE_CHECKING:  # who checks types should still find misspelt names

    def __getattr__(name: str) -> Any:
        if name in _FRAMEWORKS:
            return importlib.import_module(f"gradwire.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"gradwire.{_HOMES[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_FRAMEWORKS})
