"""Connects the step protocol of an elastic run to this rank's group, state and checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from gradwire.errors import Aborted, Broken, GroupTimeout, PeerLost, ReplicasDiverged
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.training import transfer
from gradwire.training.checkpoint_saver import CheckpointSaver
from gradwire.training.commit_rules import Settlement, has_joiners
from gradwire.training.state import State
from gradwire.training.step_requests import (
    AwaitWriter,
    Gather,
    GatherDigests,
    HandOver,
    LoadCheckpoint,
    LoadShard,
    NextGeneration,
    Pause,
    Request,
    Vote,
)

log = logging.getLogger("gradwire.training")

_RUNS: dict[tuple[int, str], int] = {}  # (job, member) → how many elastic runs this member has begun


class GroupReplica:
    """Performs the requests of the step protocol with this rank's group and state, and logs its reports."""

    def __init__(
        self, state: State, group: Group, saver: CheckpointSaver | None, stop_wanted: Callable[[], int]
    ) -> None:
        self.group = group
        self.stop_wanted = stop_wanted
        self._saver = saver
        self.recoveries = 0
        self.undoing: list[Callable[[], None]] = []
        self._state = state
        self._broke_at = 0.0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def generation(self) -> int:
        return self.group.generation

    def digest(self) -> str:
        return self._state.digest()

    def digest_if_readable(self) -> str:
        """Return the digest, or "" if the state cannot be read: a step may have donated some of its JAX arrays.

        An empty digest marks the state as not intact.
        """
        try:
            return self._state.digest()
        except Exception as error:
            log.warning("the state on this rank can no longer be read: %s", error)
            return ""

    def digests(self) -> list[tuple[str, str]]:
        return list(self._state.digests().items())

    def others_wait(self) -> bool:
        return has_joiners(GroupInternals(self.group).news(), self.group.generation)

    def last_checkpoint(self) -> str:
        return "" if self._saver is None else self._saver.find_last()

    def can_recover(self, error: Broken) -> bool:
        if not isinstance(error, (PeerLost, Aborted, GroupTimeout)) or not self.group.capabilities.recovers:
            return False
        internals = GroupInternals(self.group)
        own = isinstance(error, Aborted) and error.culprit == self.rank and not internals.is_left_behind
        return internals.is_broken and not own

    def begun_runs(self, number: int) -> int:
        return _begun_runs(GroupInternals(self.group), number)

    def leave(self) -> None:
        self.group.close()

    # -- requests of the protocol -------------------------------------------------------------------------------------

    def perform(self, request: Request) -> Any:
        group = self.group
        match request:
            case Vote(ballot):
                return group.all_reduce(ballot, op="max")
            case Gather(value, operation):
                return GroupInternals(group).gather(value, operation)
            case GatherDigests(digests):
                return group.all_gather_values(digests)
            case HandOver():
                self._hand_over(request)
            case LoadCheckpoint() | LoadShard() | AwaitWriter():
                return self._perform_saving(request)
            case NextGeneration():
                self.group = group.recover()
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _perform_saving(self, request: LoadCheckpoint | LoadShard | AwaitWriter) -> Any:
        saver = self._saver
        assert saver is not None  # only a run with a folder for checkpoints makes these requests
        match request:
            case LoadCheckpoint():
                return saver.load()
            case LoadShard(name, step):
                log.log(_level_on(0, self.rank), "continuing after step %d, from the checkpoint %s", step, name)
                return saver.load_shard(name)
            case AwaitWriter(seconds):
                return saver.wait(seconds)

    def _hand_over(self, request: HandOver) -> None:
        giver, takers, digest = request.giver, request.takers, request.digest
        nbytes = transfer.hand_over(self.group, self._state, giver, takers, digest, overwrite=request.overwrite)
        if giver != self.rank:
            log.info("rank %d received the state of step %d (%d bytes)", self.rank, request.step, nbytes)

    # -- reports of the protocol --------------------------------------------------------------------------------------

    def is_short_of_members(self, wanted: int) -> None:
        log.warning("waiting for members: the job has %d and needs at least %d", self.size, wanted)

    def begins(self) -> None:
        GroupInternals(self.group).begin_state_agreement()

    def decided(self, settlement: Settlement) -> None:
        """Nothing to do."""

    def holds(self, version: tuple[int, int]) -> None:
        """Nothing to do."""

    def committed(self, version: tuple[int, int]) -> None:
        GroupInternals(self.group).end_state_agreement()

    def diverged(self, error: ReplicasDiverged) -> None:
        log.error("%s", error)

    def broke(self, error: Broken, step: int) -> None:
        self._broke_at = time.monotonic()
        level = _level_on(0 if error.culprit != 0 else 1, self.rank)
        log.log(level, "generation %d broke after step %d: %s", self.generation, step, error)
        for undo in self.undoing:
            undo()

    def recovered(self) -> None:
        self.recoveries += 1
        took = time.monotonic() - self._broke_at
        level = _level_on(0, self.rank)
        log.log(level, "recovered in %.2f s: generation %d has %d members", took, self.generation, self.size)


def _level_on(reporter: int, rank: int) -> int:
    """Return the level of a message that all ranks log: a warning on one rank, so that it is shown once."""
    return logging.WARNING if rank == reporter else logging.INFO


def _begun_runs(internals: GroupInternals, number: int) -> int:
    """Return how many elastic runs this member has begun, including the current one.

    `number` is 0 at first. Later it is the result of the first call, which is then returned again.
    """
    member = internals.identity.job, internals.member_id
    _RUNS[member] = max(_RUNS.get(member, 0), number) if number else _RUNS.get(member, 0) + 1
    return number or _RUNS[member]
