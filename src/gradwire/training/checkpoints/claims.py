"""The order in which runs have claimed a folder of checkpoints.

The file `claims` has one fence per line. The order of runs is the order of their first lines, and not that of their
ids: an id begins with the time, and a clock that was set back must not lock a new run out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import Fenced
from gradwire.training.fence import Fence, FenceRecord, locked_record, parse_fences

FILE = "claims"


@dataclass(frozen=True, slots=True)
class Claims:
    """The fences that have been recorded in a folder, in the order of their lines."""

    fences: tuple[Fence, ...]

    @property
    def runs(self) -> list[bytes]:
        """The ids of the runs, in the order in which they claimed the folder."""
        return list(dict.fromkeys(fence.run for fence in self.fences))

    def later(self, fence: Fence) -> Fence | None:
        """Return a fence that outdates this one, or None.

        If only other runs are recorded, the record of this run was lost, and the other runs have claimed the folder
        after that.
        """
        last = self.runs[-1] if self.fences else fence.run
        own = [one for one in self.fences if one.run == last and (one > fence or last != fence.run)]
        return max(own, default=None)

    def age_key(self, step: int, fence: Fence) -> tuple[int, bytes, int, int]:
        """Return a key that sorts checkpoints from the oldest to the newest.

        Checkpoints of runs that are not recorded come first, in the order of their ids.
        """
        runs = self.runs
        place = runs.index(fence.run) if fence.run in runs else -1
        return place, fence.run, step, fence.generation


@dataclass(frozen=True, slots=True)
class LockedClaims:
    """The claims of a folder, while this process holds their lock."""

    folder: Path
    record: FenceRecord

    def read(self) -> Claims:
        return Claims(tuple(self.record.fences()))

    def add(self, fence: Fence, *, is_new: bool) -> None:
        """Record a fence; raise `Fenced` if it is outdated. `is_new`: the run may be one that has no line yet."""
        claims = self.read()
        later = claims.later(fence)
        if later is not None and not (is_new and fence.run not in claims.runs):
            raise Fenced(
                f"{self.folder} was claimed by generation {later.generation} of run {later.run.hex()} after "
                f"generation {fence.generation} of run {fence.run.hex()}: this process is outdated and cannot write "
                "checkpoints there"
            )
        if fence not in claims.fences:
            self.record.append(fence)


@contextlib.contextmanager
def locked_claims(folder: Path) -> Iterator[LockedClaims]:
    """Lock the claims of a folder for other processes until the block ends."""
    with locked_record(folder / FILE) as record:
        yield LockedClaims(folder, record)


def read_claims(folder: Path) -> Claims:
    """Return the claims of a folder without a lock, also on a read-only file system. A missing file has none.

    That is safe because lines are only appended and an incomplete line is ignored.
    """
    try:
        return Claims(tuple(parse_fences((folder / FILE).read_bytes())))
    except FileNotFoundError:
        return Claims(())
