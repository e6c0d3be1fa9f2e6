"""The tree of errors that gradwire raises.

    GradwireError
    ├── ConfigError (ValueError)            the configuration of the job is invalid; nothing was started
    │   ├── InvalidRank                     a rank outside 0 ≤ rank < size, or the caller's own rank instead of a peer's
    │   └── InvalidSize                     an impossible size of a job, a group or a count
    ├── ArrayError (TypeError)              the array cannot be used: read-only, big-endian, not in CPU memory
    ├── UnsupportedOp                       this dtype, algorithm or backend does not support the operation
    ├── SizeMismatch (ValueError)           a received message does not fit the buffer; the message is kept
    ├── Timeout (TimeoutError)              a call did not finish in time; the group stays usable
    │   └── GroupTimeout                    see Broken
    ├── NoConnection (ConnectionError)      no coordinator or peer answered
    │   └── Refused                         the coordinator or peer refused: wrong secret, rank in use, another job …
    │       ├── Finished                    the job has finished and cannot be joined
    │       └── OtherRun                    this process and the coordinator belong to different runs of the job
    ├── TransportError (OSError)            an input or output operation of the operating system failed
    ├── WorkerFailed                        a launched process failed
    ├── JournalError                        the coordinator's journal cannot be read or written
    ├── CheckpointError (OSError)           a checkpoint cannot be written or read
    ├── Fenced                              a later run or generation has already written this file
    ├── StateLost                           no intact copy of the training state is left
    ├── NotFinite (ArithmeticError)         a rank's gradient is NaN or infinite; all ranks raise it and can continue
    ├── ReplicasDiverged                    tensors that should be equal on all ranks differ
    ├── Closed (ConnectionError)            this process has closed the group, or inherited it through a fork
    └── Broken                              the group is broken on every rank of its generation
        ├── PeerLost (ConnectionError)      a rank died, left or was disconnected while other ranks needed it
        ├── CollectiveMismatch              ranks called different collectives, or the same one with different arguments
        ├── Aborted                         a rank stopped on purpose: `abort()`, an exception, Ctrl-C
        └── GroupTimeout (Timeout)          a collective did not finish in time

`collectives.InvalidSchedule` also derives from GradwireError: an algorithm is wrong. It is raised before the schedule
runs.

Errors carry their facts as attributes: `culprit` (a world rank or None), `operation`, `generation`, and where they
apply `rank`, `peer`, `seconds`, and `step` (the step of an elastic run in which the error occurred).
"""

from __future__ import annotations

from typing import Any


class GradwireError(Exception):
    """The base class of all errors that gradwire raises on purpose."""

    def __init__(
        self,
        message: str = "",
        *,
        culprit: int | None = None,
        operation: str | None = None,
        generation: int | None = None,
        rank: int | None = None,
        peer: int | None = None,
        seconds: float | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.operation = operation
        self.generation = generation
        self.rank = rank
        self.peer = peer
        self.seconds = seconds
        self.step = step

    @property
    def message(self) -> str:
        """The text of the error, the same as `str(error)`."""
        return str(self.args[0]) if self.args else ""

    def facts(self) -> dict[str, Any]:
        """Return the error's public attributes that are not None, by name. They are sent to other processes with it."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_") and value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts())


def _rebuild(kind: type[GradwireError], message: str, facts: dict[str, Any]) -> GradwireError:
    return kind(message, **facts)


class ConfigError(GradwireError, ValueError):
    """The caller's configuration of the job is invalid. Raised before anything was started."""


class InvalidRank(ConfigError):
    """A rank does not exist in the group, or is the caller's own where a peer is required.

    `rank` is the invalid number, if it is one, and `size` the number of ranks.
    """

    def __init__(self, message: str = "", *, size: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.size = size


class InvalidSize(ConfigError):
    """A size or a list of counts is impossible."""


class ArrayError(GradwireError, TypeError):
    """The array cannot be used; the message says what to pass instead."""


class UnsupportedOp(GradwireError):
    """The dtype, algorithm or backend does not support the operation. Raised before anything was sent.

    `operation` is the name of the call.
    """


class SizeMismatch(GradwireError, ValueError):
    """A received message does not fit the buffer; it is kept for a later `recv` with a buffer that fits.

    `expected` is the number of bytes of the buffer, and `got` that of the message.
    """

    def __init__(self, message: str = "", *, expected: int | None = None, got: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.expected = expected
        self.got = got


class Timeout(GradwireError, TimeoutError):
    """A call did not finish in time. The group stays usable, unless the error is a `GroupTimeout`."""


class NoConnection(GradwireError, ConnectionError):
    """No process answered at an address before the deadline."""


class Refused(NoConnection):
    """The other side answered and refused this process; the message gives its reason."""


class Finished(Refused):
    """This process tried to join a job that has finished. `gradwire run` treats this as a normal exit."""


class OtherRun(Refused):
    """This process is a member of a run that the coordinator does not serve. A newly started process could join."""


class TransportError(GradwireError, OSError):
    """An operation of the operating system failed for a local reason (a port in use, no file descriptors left)."""


class WorkerFailed(GradwireError):
    """A launched worker failed; `culprit` is its rank and `exit_code` its exit code."""

    def __init__(self, message: str = "", *, exit_code: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.exit_code = exit_code


class JournalError(GradwireError):
    """The coordinator's journal is damaged, has another version, or cannot be written. The journal was not changed."""


class CheckpointError(GradwireError, OSError):
    """A checkpoint cannot be written or read; the message names the file and gives the reason.

    The cause of the error is the `OSError` of the operating system, if there was one.
    """


class Fenced(GradwireError):
    """A later run or generation has written the file: its fence is greater than the one of this process."""


class StateLost(GradwireError):
    """No remaining rank has an intact copy of the state, or a copy arrived damaged; the message says which.

    A running job does not return to a checkpoint. Start it again: it continues from the last complete checkpoint of the
    folder that was passed to `gw.elastic`. `checkpoint` is the path of that checkpoint, or None.
    """

    def __init__(self, message: str = "", *, checkpoint: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.checkpoint = checkpoint


class NotFinite(GradwireError, ArithmeticError):
    """A rank's gradient is NaN or infinite. `culprit` is that rank and `tensor` the gradient's name.

    All ranks raise this error and the group stays usable, so all ranks can skip the step.
    """

    def __init__(self, message: str = "", *, tensor: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.tensor = tensor


class ReplicasDiverged(GradwireError):
    """A rank's tensors differ from those of the other ranks.

    `culprit` is that rank and `tensor` its first tensor that differs.
    """

    def __init__(self, message: str = "", *, tensor: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.tensor = tensor


class Closed(GradwireError, ConnectionError):
    """This process has closed the group, or is a forked child that inherited the group."""


class Broken(GradwireError):
    """The group is broken on every rank of its generation; `culprit` is the rank that caused it, or None."""


class PeerLost(Broken, ConnectionError):
    """A rank died, left or was disconnected while another rank needed it."""


class CollectiveMismatch(Broken):
    """Ranks of a group called different collectives, or the same one with different arguments.

    The message shows each rank's call and its line.
    """


class Aborted(Broken):
    """A rank stopped on purpose: `abort()`, an exception that left `with group`, or Ctrl-C."""


class GroupTimeout(Timeout, Broken):
    """A collective did not finish in time, or a rank stopped reading in the middle of a message."""
