"""Saves the state of a run: copies this rank's share, writes it in a thread, and loads the newest checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import CheckpointError, ConfigError, GradwireError
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.training.checkpoints.background import BackgroundJob
from gradwire.training.checkpoints.checkpoint import Checkpoint
from gradwire.training.checkpoints.folder import CheckpointFolder, Draft
from gradwire.training.checkpoints.manifest import Head
from gradwire.training.commit_rules import NONE
from gradwire.training.fence import Fence
from gradwire.training.state import State, names_in
from gradwire.training.step_requests import Loaded
from gradwire.training.zero import assign

log = logging.getLogger("gradwire.training")

SLOW_SECONDS = 1.0  # a checkpoint that is being written for this long, and delays the next one, is worth a warning


class CheckpointSaver:
    """This rank's part in the checkpoints of a run, as `checkpoint_protocol.Saver` describes it."""

    def __init__(self, folder: CheckpointFolder, settings: str, state: State, group: Callable[[], Group]) -> None:
        """`settings` describes the folder and the other settings. `group` returns the group of the run."""
        self.settings = settings
        self._folder = folder
        self._state = state
        self._group = group
        self._job = BackgroundJob()
        self._buffer = ReusedBuffer()
        self._failure = ""  # of the copy
        self._draft: Draft | None = None  # of the checkpoint in progress
        self._head: Head | None = None
        self._began = 0.0
        self._claimed: Fence | None = None
        self._requested = False
        self._warned: set[str] = set()  # the problems that were reported on all ranks
        self.published = NONE
        self.last = ""
        """The path of the last complete checkpoint that this process knows of."""

    # -- for the protocol ---------------------------------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        return self._requested

    @property
    def epoch(self) -> int:
        news = GroupInternals(self._group()).news()
        return NONE if news is None or news.checkpoint is None else news.checkpoint

    @property
    def writing(self) -> bool:
        return self._job.running

    @property
    def failure(self) -> str:
        return self._failure or self._job.failure

    def copy(self, step: int, digest: str) -> None:
        group = self._group()
        self._requested, self._failure, self.published = False, "", NONE
        self._draft, self._began = self._folder.draft(step, fence_of(group)), time.monotonic()
        try:
            skeleton, leaves = self._state.take_apart()
            names = names_in(skeleton)
            owners = assign({name: leaf.nbytes for name, leaf in zip(names, leaves, strict=True)}, group.size)
            own = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if owners[name] == group.rank]
            shard = self._state.take_shard_apart()
            shard_names = [] if shard is None else names_in(shard[0])
            of_shard = [] if shard is None else list(zip(shard_names, shard[1], strict=True))
            copies = self._buffer.filled_with([*own, *of_shard])
        except (GradwireError, MemoryError) as error:
            self._failure = f"the state cannot be copied: {error}"
            return
        self._head = Head(step, fence_of(group), group.size, skeleton, tuple(names), digest)
        part = None if shard is None else (shard[0], copies[len(own) :])
        draft, rank, fence = self._draft, group.rank, self._head.fence

        def write(cancelled: Callable[[], bool]) -> None:
            # A new generation, or the folder could not be written before, or it was removed.
            if rank == 0 and not (self._claimed == fence and self._folder.path.is_dir()):
                self._folder.claim(fence)
                self._claimed = fence
            draft.write_part(rank, copies[: len(own)], shard=part, cancelled=cancelled)

        self._job.start(write)

    def publish(self) -> None:
        draft, head = self._draft, self._head
        if self._group().rank != 0 or draft is None or head is None:
            return

        def published() -> None:
            self.published = head.step

        self._job.start(lambda cancelled: draft.publish(head), done=published)

    def drop(self) -> None:
        self._job.cancel()
        self._failure = ""

    def completed(self, step: int, epoch: int) -> None:
        assert self._draft is not None
        self.last = str(self._draft.path)
        took = time.monotonic() - self._began
        log.info("the checkpoint of step %d is complete after %.2f s: %s", step, took, self.last)
        if epoch == self.epoch != NONE:
            group = self._group()
            _run_aside(lambda: GroupInternals(group).report_checkpoint(epoch))

    def failed(self, step: int, reasons: Sequence[str]) -> None:
        names = GroupInternals(self._group()).identity.names
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        text = f"{names[rank]} could not write the checkpoint of step {step}: {reason}. Training continues"
        self._warn("failed", text, repeated=True)
        draft, rank = self._draft, self._group().rank
        if draft is not None:
            _run_aside(lambda: draft.discard(rank))

    def delayed(self, step: int, by: int) -> None:
        took = time.monotonic() - self._began
        if took < SLOW_SECONDS:
            return
        text = (
            f"the checkpoint of step {step} is delayed: that of step {by} is still being written after {took:.1f} s. "
            "The disk is slow, or checkpoint_every is too small"
        )
        self._warn("delayed", text)

    def _warn(self, problem: str, text: str, *, repeated: bool = False) -> None:
        """Log a problem that all ranks know of: the first time as a warning on all ranks.

        Later, `repeated` makes it a warning on rank 0 only; otherwise it is no warning any more.
        """
        first = problem not in self._warned
        self._warned.add(problem)
        shown = first or (repeated and self._group().rank == 0)
        log.log(logging.WARNING if shown else logging.INFO, "%s", text)

    # -- for the run --------------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Ask for a checkpoint after the current step."""
        self._requested = True

    def wait(self, seconds: float) -> None:
        """Wait until this rank's thread has written its files, but at most for some seconds."""
        self._job.wait(seconds)

    def find_last(self) -> str:
        """Return the path of the last complete checkpoint in the folder; empty if there is none."""
        try:
            found = self._folder.complete()
        except CheckpointError:
            return self.last
        return str(found[0].path) if found else ""

    def load(self) -> Loaded:
        """Load the newest complete checkpoint that is not damaged, and claim the folder for this run."""
        try:
            self._claim()
            for checkpoint in self._folder.find():
                if not checkpoint.is_removable:  # an older one would silently repeat steps
                    raise CheckpointError(f"cannot continue from {checkpoint.path}: {checkpoint.problem}")
                if checkpoint.is_complete and self._loaded(checkpoint):
                    self.last = str(checkpoint.path)
                    return Loaded(checkpoint.step, checkpoint.path.name)
        except GradwireError as error:
            return Loaded(problem=str(error))
        return Loaded()

    def load_shard(self, name: str) -> str:
        """Load this rank's part of the sharded entries from the checkpoint of this name; return why it cannot be."""
        self.last = str(self._folder.path / name)
        if not self._state.is_sharded:
            return ""
        try:
            found = next((one for one in self._folder.complete() if one.path.name == name), None)
            if found is None:
                raise CheckpointError(f"rank {self._group().rank} does not see the checkpoint {name}")
            self._state.put_shards_together(found.load_shards())
        except (GradwireError, ValueError) as error:
            return str(error)
        return ""

    def _claim(self) -> None:
        try:
            fence = fence_of(self._group())
            self._folder.claim(fence)
            self._claimed = fence
        except CheckpointError as error:  # a folder that cannot be written may still have a checkpoint to resume from
            log.warning("no checkpoint can be written: %s. Training continues", error)

    def _loaded(self, checkpoint: Checkpoint) -> bool:
        """Load a checkpoint into the state; return False if it is damaged."""
        try:
            skeleton, leaves = checkpoint.load()
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # it may be intact: an older one would repeat steps without need
                raise
            log.warning("the checkpoint %s is damaged and is not used: %s", checkpoint.path, error)
            return False
        try:
            self._state.check_fits(skeleton)
            self._state.put_together(skeleton, leaves)
        except Exception as error:  # also from the program's own load_state_dict
            raise ConfigError(f"the checkpoint {checkpoint.path} does not fit this program's state: {error}") from error
        if self._state.digest() != checkpoint.manifest.head.digest:
            raise ConfigError(f"the checkpoint {checkpoint.path} was loaded, but the state then has another digest")
        return True


def _run_aside(operation: Callable[[], object]) -> None:
    """Run an operation that handles its own errors in a thread, also while a next checkpoint is written."""
    threading.Thread(target=operation, name="gradwire-checkpoint-end", daemon=True).start()


class ReusedBuffer:
    """Memory for copies of arrays, allocated once and reused while it is large enough."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def filled_with(self, arrays: Sequence[tuple[str, Array]]) -> list[tuple[str, Array]]:
        """Return copies of named arrays. They are valid until the next call."""
        starts, total = [], 0
        for _, array in arrays:
            starts.append(total)
            total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if total > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # releases the old memory first
            self._memory = np.empty(total, np.uint8)
        return [(name, self._copy(array, start)) for (name, array), start in zip(arrays, starts, strict=True)]

    def _copy(self, array: Array, start: int) -> Array:
        copy: Array = self._memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy


_ALIGNMENT = 64  # bytes


def fence_of(group: Group) -> Fence:
    """Return the fence of the run and generation of a group."""
    identity = GroupInternals(group).identity
    return Fence(identity.run, identity.number)
