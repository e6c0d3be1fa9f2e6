"""The protocol of checkpoints: when all ranks copy their state, and when a checkpoint is complete. No I/O, no clock.

All decisions follow from the votes of the step protocol, so every rank makes the same ones. A checkpoint goes through
these states, one checkpoint at a time:

    wanted      a rank asks for it, its step is a multiple of `every`, or the run stops
    copied      after a vote, all ranks have copied their share of the state, and their threads write it
    written     a vote shows that no rank is writing any more: rank 0 publishes the checkpoint
    complete    a vote shows that rank 0 has published it

If a rank cannot write its part, a vote shows that too. Then all ranks exchange the reasons, drop the checkpoint and
continue training. A checkpoint belongs to one generation: when a new generation begins, a checkpoint that is not
complete is dropped and copied anew after the next step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from gradwire.training.commit_rules import NONE, Wishes
from gradwire.training.step_requests import Gather

FAILURE = "checkpoint (failure)"  # the name of the exchange of reasons in errors


class Saver(Protocol):
    """This rank's part in the checkpoints. All methods return at once, except `copy`, which copies memory."""

    @property
    def settings(self) -> str:
        """The folder and the other settings, which must be the same on all ranks."""

    @property
    def requested(self) -> bool:
        """Whether this rank asks for a checkpoint."""

    @property
    def epoch(self) -> int:
        """The epoch for which the coordinator asks this rank for a checkpoint; NONE if it does not."""

    @property
    def writing(self) -> bool:
        """Whether a thread of this rank still writes a file."""

    @property
    def failure(self) -> str:
        """Why this rank could not write its part of the checkpoint in progress; empty if it could."""

    @property
    def published(self) -> int:
        """The step of the checkpoint in progress if this rank has published it; otherwise NONE."""

    def copy(self, step: int, digest: str) -> None:
        """Copy this rank's share of the state after `step`, and begin to write it."""

    def publish(self) -> None:
        """Begin to publish the checkpoint in progress, if this is rank 0."""

    def drop(self) -> None:
        """Stop writing the checkpoint in progress. It stays incomplete."""

    def completed(self, step: int, epoch: int) -> None:
        """Report that the checkpoint of `step` is complete.

        `epoch` is the last one for which the coordinator has asked, before this checkpoint was copied; or NONE.
        """

    def failed(self, step: int, reasons: Sequence[str]) -> None:
        """Report that the checkpoint of `step` failed. `reasons` has one entry per rank, empty where it succeeded."""

    def delayed(self, step: int, by: int) -> None:
        """Report that the checkpoint of `step` waits, because that of step `by` is not complete yet."""


class CheckpointProtocol:
    """The progress of the checkpoints of one rank in a run of steps."""

    def __init__(self, saver: Saver, every: int | None) -> None:
        self._saver = saver
        self._every = every
        self._pending: int | None = None  # the step of the checkpoint that is being written
        self._epoch = NONE  # the last epoch for which the coordinator has asked and a checkpoint was copied
        self._published = False  # whether rank 0 was asked to publish it
        self._owed = False  # a checkpoint is wanted that has not been copied yet
        self._copied = NONE  # the step that was copied last, in this generation
        self._saved = NONE  # the step of the last complete checkpoint

    @property
    def settings(self) -> str:
        return f"{self._saver.settings}, every {self._every}"

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint is wanted or in progress. After a vote, all ranks agree on this."""
        return self._owed or self._pending is not None

    def resumed(self, step: int) -> None:
        """Note that the run continues from the complete checkpoint of `step`."""
        self._saved = step

    def begin_generation(self) -> None:
        """Drop a checkpoint that is not complete. It is copied anew after the next step."""
        if self._pending is not None:
            self._saver.drop()
            self._pending, self._owed = None, True
        self._copied = NONE

    def wishes(self, step: int, *, last: bool) -> Wishes:
        """Return what this rank asks for and reports when it votes on `step`. `last`: the run ends after it."""
        unsaved = last and step not in (NONE, self._copied, self._saved)
        saver = self._saver
        asked = saver.requested or saver.epoch > self._epoch
        return Wishes(
            checkpoint=self._owed or asked or self._is_due(step) or unsaved,
            writing=saver.writing,
            failed=self._pending is not None and bool(saver.failure),
            published=saver.published,
            epoch=saver.epoch,
        )

    def advance(self, step: int, digest: str, wishes: Wishes, *, last: bool = False) -> Generator[Gather, Any, None]:
        """Act on the result of the vote on `step`, whose state has this digest. `last`: the run ends after it."""
        if self._pending is not None:
            yield from self._continue(self._pending, wishes)
        wanted = wishes.checkpoint and step not in (NONE, self._copied)
        self._owed = wanted and (self._pending is not None or wishes.writing)
        if self._owed:
            if self._pending is not None and self._is_due(step) and not last:
                self._saver.delayed(step, self._pending)
        elif wanted:
            self._pending, self._published, self._copied = step, False, step
            self._epoch = max(self._epoch, wishes.epoch)
            self._saver.copy(step, digest)

    def _is_due(self, step: int) -> bool:
        """Whether the run writes a checkpoint after this step without being asked, and has not done so yet."""
        return self._every is not None and (step + 1) % self._every == 0 and step not in (self._copied, self._saved)

    def _continue(self, step: int, wishes: Wishes) -> Generator[Gather, Any, None]:
        """Advance the checkpoint in progress to its next state, if the vote shows that it has reached it."""
        if wishes.failed:
            reasons = yield Gather(self._saver.failure, FAILURE)
            self._saver.drop()
            self._pending = None
            self._saver.failed(step, [str(reason) for reason in reasons])
        elif wishes.published == step:
            self._pending, self._saved = None, step
            self._saver.completed(step, self._epoch)
        elif not wishes.writing and not self._published:
            self._published = True
            self._saver.publish()
