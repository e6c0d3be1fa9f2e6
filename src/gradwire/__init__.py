"""gradwire: keeps many copies of a model in step.

The layers, each importing only from those above it:

    core            the native core, if it is there
    errors          everything that is raised
    events          the one tracing point
    arrays          what users hand in, as typed views
    wire            the message header and its fingerprint
    topology        which ranks share a host
    machine         what this machine is, and what of it this process may use
    collectives     algorithms as schedules; their verifier
    tuning          the table that algorithms are chosen by, in a file
    security        the job's secret, and who may open a link
    transports      links: in one process, over TCP; memory that ranks of a host share
    liveness        beats and who misses them, the log of calls, the verdict on what broke, control messages
    executors       carry schedules out
    messages        point-to-point messages, matched
    generation      one membership at work: links, service thread, the one failure path
    operations      what each collective checks, exchanges and returns
    work            handles and queues of asynchronous collectives
    exchange        runs a group's operations in its one order
    post            send, recv and what is made of them
    group           what users call
    lifetime        what begins and ends with this process
    agreement       what ranks settle before the first call
    membership      the rendezvous of a job's processes
    environments    one small file for each way of being started
    address         addresses as users write them
    config          who am I, where is the coordinator
    seat            a process's place in one generation after another
    threads         ranks as threads of one process
    job             init, local_group
    launch          starting and supervising processes
    training        what keeps replicas in step beyond the all-reduce
    torch           DDP's and torch.distributed's interfaces to groups and training
    simulate        whole jobs in virtual time, with faults by seed; a pytest fixture
    bench           `gradwire bench`: the collectives measured, in turns with other engines
    cli             the command line
"""

from __future__ import annotations

from gradwire.errors import (
    Aborted,
    ArrayError,
    Broken,
    Closed,
    CollectiveMismatch,
    ConfigError,
    Finished,
    GradwireError,
    InvalidRank,
    InvalidSize,
    JournalError,
    NoConnection,
    PeerLost,
    Refused,
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
from gradwire.membership.worker import WorkerNode
from gradwire.topology import Topology
from gradwire.training.elastic import Elastic, Step, elastic
from gradwire.training.sampler import Sampler
from gradwire.work import Stream, Work

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "ArrayError",
    "Broken",
    "Capabilities",
    "Closed",
    "CollectiveMismatch",
    "ConfigError",
    "Elastic",
    "Finished",
    "GradwireError",
    "Group",
    "InvalidRank",
    "InvalidSize",
    "JournalError",
    "NoConnection",
    "PeerLost",
    "Refused",
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
    "elastic",
    "init",
    "launch",
    "local_group",
    "loopback_pair",
]
