"""Simulate the checkpoints of a job: the shared folder, threads that write, and a check of each complete checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NoReturn, Protocol

from gradwire.simulate.invariants import Invariants
from gradwire.simulate.process import Process
from gradwire.simulate.rank import Rank
from gradwire.simulate.toy_training import digest
from gradwire.training.commit_rules import NONE

EVERY = 2  # steps between two checkpoints
WRITE_SECONDS = (0.05, 0.5, 2.0)
FAILURES = 0.1  # the share of writes that fail
Key = tuple[bytes, int, int]
"""Identifies a checkpoint: its run, its generation and its step."""


class CheckpointFolder:
    """The folder that all members share."""

    def __init__(self) -> None:
        self.parts: dict[Key, dict[int, str]] = {}  # the digest of the state of which each rank has written its part
        self.complete: dict[Key, str] = {}
        self.failed = 0


class Trainer(Protocol):
    """The member whose checkpoints these are."""

    @property
    def rank(self) -> Rank: ...

    @property
    def run(self) -> bytes: ...


class SimulatedSaver:
    """One member's part in the checkpoints, as `checkpoint_protocol.Saver` describes it."""

    settings = "simulated"
    requested = False
    epoch = NONE

    def __init__(
        self,
        process: Process,
        trainer: Trainer,
        folder: CheckpointFolder,
        ledger_of: Callable[[bytes], Invariants],
        fail: Callable[[str], NoReturn],
        random: Random,
    ) -> None:
        self._process, self._trainer, self._folder = process, trainer, folder
        self._ledger_of, self._fail, self._random = ledger_of, fail, random
        self._key: Key = b"", 0, NONE
        self._attempt = 0  # of writing; a thread whose attempt was dropped ends without effect
        self.writing = False
        self.failure = ""
        self.published = NONE

    def copy(self, step: int, digest: str) -> None:
        rank = self._trainer.rank
        self._key = key = self._trainer.run, rank.number, step
        self.failure, self.published = "", NONE

        def write() -> None:
            self._folder.parts.setdefault(key, {})[rank.rank] = digest

        self._begin(write)

    def publish(self) -> None:
        rank = self._trainer.rank
        if rank.rank == 0:
            self._begin(lambda: self._publish(self._key, rank.size))

    def _publish(self, key: Key, size: int) -> None:
        parts = self._folder.parts[key]
        if sorted(parts) != list(range(size)):
            self._fail(
                f"{self._process.name} publishes a checkpoint of {size} ranks that has the parts {sorted(parts)}"
            )
        if len(set(parts.values())) != 1:
            self._fail(f"the parts of the checkpoint of step {key[2]} belong to different states")
        self._folder.complete[key] = parts[0]
        self.published = key[2]

    def _begin(self, operation: Callable[[], None]) -> None:
        """Run an operation in a thread, which takes some time and can fail."""
        if self.writing:
            self._fail(f"{self._process.name} begins to write while its thread still writes")
        self.writing, attempt = True, self._attempt
        fails = self._random.random() < FAILURES

        def end() -> None:
            self.writing = False
            if attempt != self._attempt:
                return
            if fails:
                self.failure = "the disk is full"
            else:
                operation()

        self._process.later(self._random.choice(WRITE_SECONDS), end)

    def drop(self) -> None:
        self._attempt += 1
        self.failure = ""

    def completed(self, step: int, epoch: int) -> None:
        run, generation, copied = self._key
        state = self._ledger_of(run).states[step, generation]
        if step != copied or self._folder.complete.get(self._key) != digest(state):
            self._fail(f"{self._process.name} takes the checkpoint of step {step} for complete, but it is not")

    def failed(self, step: int, reasons: Sequence[str]) -> None:
        self._folder.failed += 1
        if not any(reasons):
            self._fail(f"the checkpoint of step {step} failed, but no rank has a reason")

    def delayed(self, step: int, by: int) -> None:
        """Nothing to do."""
