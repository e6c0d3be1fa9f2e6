"""Defines run ids, and the identity of a rank that every message carries."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field

from gradwire.topology import Topology
from gradwire.wire import Header, Kind, WireError

# The version of the messages that set up a generation (`handshake.py`), and of the messages that its members exchange.
# Members of different versions cannot work together: the coordinator refuses a newcomer with another version than its
# own. Since version 2, point-to-point messages carry dtype and shape; since version 3, the votes of elastic runs carry
# stops and checkpoints.
PROTOCOL = 3
RUN_BYTES = 16
_TIME_BYTES = 8
_MAX_REPLACEMENTS = 1000  # of runs, one after the other, by one coordinator


def new_run(after: bytes = b"") -> bytes:
    """Return the id of a new run of a job: the time in nanoseconds, then random bytes.

    Ids of later runs are greater. If the id of an earlier run is given as `after`, the new id is greater than it even
    when the clock was set back.

    >>> new_run() < new_run(), new_run(after=b"\x7f" + bytes(15)) > b"\x7f" + bytes(15)
    (True, True)
    """
    earliest = int.from_bytes(after[:_TIME_BYTES], "big") + 1 if after else 0
    began = min(max(time.time_ns(), earliest), (1 << 8 * _TIME_BYTES) - 1)
    return began.to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(RUN_BYTES - _TIME_BYTES)


def next_run(run: bytes) -> bytes:
    """Return the id of the run that a coordinator begins in place of `run`. It is greater and depends on `run` only.

    >>> next_run(bytes(16)) > bytes(16), next_run(bytes(16)) == next_run(bytes(16))
    (True, True)
    """
    began = int.from_bytes(run[:_TIME_BYTES], "big") + 1
    return began.to_bytes(_TIME_BYTES, "big") + hashlib.sha256(run).digest()[: RUN_BYTES - _TIME_BYTES]


def replaces(run: bytes, earlier: bytes) -> bool:
    """Return whether a coordinator has begun `run` in place of `earlier`, directly or in several steps.

    >>> replaces(next_run(next_run(bytes(16))), bytes(16)), replaces(new_run(), bytes(16)), replaces(bytes(16), b"")
    (True, False, False)
    """
    steps = int.from_bytes(run[:_TIME_BYTES], "big") - int.from_bytes(earlier[:_TIME_BYTES], "big")
    if not earlier or not 0 < steps <= _MAX_REPLACEMENTS:
        return False
    for _ in range(steps):
        earlier = next_run(earlier)
    return run == earlier


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank in one generation of a run. `job` is the number in message headers that stands for the run."""

    run: bytes
    number: int
    rank: int
    names: tuple[str, ...]  # of all ranks, in the form that errors show
    topology: Topology
    job: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", int.from_bytes(self.run[_TIME_BYTES:], "little"))  # the random half of the id

    @property
    def size(self) -> int:
        return len(self.names)

    def frame(self, kind: Kind, payload: bytes = b"", **fields: int) -> bytes:
        """Return a whole message of this rank: header and payload. Used for everything but collectives."""
        known = {"source": self.rank, "group": 0, "sequence": 0, "fingerprint": 0, "tile": 0, "round": 0}
        header = Header(kind=kind, job=self.job, generation=self.number, nbytes=len(payload), **(known | fields))
        return header.pack() + payload

    def check_header(self, header: Header) -> None:
        """Raise `WireError` if the message belongs to another run or generation than this one."""
        if (header.job, header.generation) != (self.job, self.number):
            raise WireError(f"a message of job {header.job:#x}, generation {header.generation}")
