"""The tree of errors that gradwire raises.

    GradwireError
    ├── ConfigError (ValueError)            the job was described wrongly; nothing was started
    │   ├── InvalidRank                     a rank outside 0 ≤ rank < size, or one's own where a peer is meant
    │   └── InvalidSize                     a job, group or count of impossible size
    ├── ArrayError (TypeError)              an array that cannot be used as given: read-only, big-endian, not on the CPU
    ├── UnsupportedOp                       the operation has no meaning for this dtype, algorithm or backend
    ├── SizeMismatch (ValueError)           a received message and the buffer for it differ in size; the message is kept
    ├── NoConnection (ConnectionError)      no coordinator or peer answered
    │   └── Refused                         one answered and said no: wrong secret, taken rank, another job …
    │       ├── Finished                    the job's work is done, and there is nothing left to join
    │       └── OtherRun                    this process is a member of another run of the job than the coordinator's
    ├── TransportError (OSError)            the operating system failed an input or output operation
    ├── WorkerFailed                        a launched process ended badly
    ├── JournalError                        the coordinator's journal cannot be read or written
    ├── Fenced                              a later run or generation has written what this one wants to write
    ├── StateLost                           no sound copy of the training state is left
    ├── NotFinite (ArithmeticError)         a rank's gradient is NaN or infinite; all ranks raise it, and may go on
    ├── ReplicasDiverged                    ranks that should hold the same tensors do not
    ├── Closed (ConnectionError)            this process has closed the group, or inherited it through a fork
    └── Broken                              the group is broken on every rank of its generation
        ├── PeerLost (ConnectionError)      a rank died, left or was cut off while others needed it
        ├── CollectiveMismatch              ranks called different things
        ├── Aborted                         a rank gave up: `abort()`, an exception, Ctrl-C
        └── Timeout (TimeoutError)          a collective did not finish in time (or a recv, a send, a wait did not:
                                            then the group goes on, and `.culprit` is None)

Beside them there is `collectives.InvalidSchedule`: an algorithm is wrong, found before its schedule runs.

Errors carry their facts as attributes: `culprit` (a world rank or None), `operation`, `generation`, and where they
make sense `rank`, `peer`, `seconds`.
"""

from __future__ import annotations

from typing import Any


class GradwireError(Exception):
    """The base of everything that gradwire raises on purpose."""

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
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.operation = operation
        self.generation = generation
        self.rank = rank
        self.peer = peer
        self.seconds = seconds

    @property
    def message(self) -> str:
        """What happened, in words: `str(error)`."""
        return str(self.args[0]) if self.args else ""

    def facts(self) -> dict[str, Any]:
        """What this error knows beside its text, by name; used to carry it to other processes."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_") and value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts())


def _rebuild(kind: type[GradwireError], message: str, facts: dict[str, Any]) -> GradwireError:
    return kind(message, **facts)


class ConfigError(GradwireError, ValueError):
    """The job's description does not hold together: the caller's side, before anything was started."""


class InvalidRank(ConfigError):
    """A rank that does not exist in the group, or one's own where only a peer makes sense."""


class InvalidSize(ConfigError):
    """A size or a set of counts that cannot be."""


class ArrayError(GradwireError, TypeError):
    """The array cannot be used as given; the message says what would do."""


class UnsupportedOp(GradwireError):
    """The operation has no meaning here; found before anything was sent."""


class SizeMismatch(GradwireError, ValueError):
    """A message does not fit the buffer offered for it; it is kept for a `recv` that fits."""


class NoConnection(GradwireError, ConnectionError):
    """Nobody answered at an address until the deadline."""


class Refused(NoConnection):
    """The other side answered and turned this process away; the message carries its reason."""


class Finished(Refused):
    """This process came to join a job whose work is done; under `gradwire run` that is an end like any other."""


class OtherRun(Refused):
    """This process is a member of a run that the coordinator does not serve (any more); started anew, it could join."""


class TransportError(GradwireError, OSError):
    """The operating system failed an operation that is not a peer's doing (a busy port, no file descriptors)."""


class WorkerFailed(GradwireError):
    """A launched worker ended badly; `culprit` is its rank and `exit_code` how it ended."""

    def __init__(self, message: str = "", *, exit_code: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.exit_code = exit_code


class JournalError(GradwireError):
    """The coordinator's journal is damaged, of another version, or cannot be written; nothing of it was changed."""


class Fenced(GradwireError):
    """A file was written under a greater fence: by a later run or generation, which went on without this process."""


class StateLost(GradwireError):
    """No rank that is left holds a sound copy of the state, or a copy arrived damaged; the message says which.

    A run does not go back to a checkpoint on its own: start the job again, from one that the program has written.
    """


class NotFinite(GradwireError, ArithmeticError):
    """A rank's gradient is NaN or infinite, raised on all ranks; `culprit` is that rank, `tensor` the gradient's name.

    The group goes on: the step can be skipped, by all alike.
    """

    def __init__(self, message: str = "", *, tensor: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.tensor = tensor


class ReplicasDiverged(GradwireError):
    """A rank no longer holds what the others hold; `culprit` is that rank, `tensor` its first tensor that differs."""

    def __init__(self, message: str = "", *, tensor: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.tensor = tensor


class Closed(GradwireError, ConnectionError):
    """This process closed the group, or is a forked child that only inherited it."""


class Broken(GradwireError):
    """The group is broken on every rank of its generation; `culprit` names the rank that caused it, where one did."""


class PeerLost(Broken, ConnectionError):
    """A rank is gone (died, left, was cut off) while another rank needed it."""


class CollectiveMismatch(Broken):
    """Ranks of one group called different things; the message shows each rank's call and its line."""


class Aborted(Broken):
    """A rank gave up on purpose: `abort()`, an exception that left `with group`, or Ctrl-C."""


class Timeout(Broken, TimeoutError):
    """Time ran out. From a collective it breaks the group; from `recv`, `send` or `wait` it does not."""
