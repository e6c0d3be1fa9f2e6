"""The simulated disk behaves like the real journal."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gradwire.errors import JournalError
from gradwire.membership.coordinator.journal import Journal
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.simulate.disk import Disk
from support.membership_claims import RUN, worker


def snapshots() -> list[dict[str, object]]:
    """Return three snapshots of a job whose only member registers for three generations."""
    state = Membership("job", RUN, start=1, minimum=1, maximum=1)
    found = []
    for generation in range(3):
        state.register(worker("a", generation), float(generation))
        found.append(state.snapshot())
    return found


@pytest.mark.parametrize("durable", [True, False])
def test_disk_after_a_kill_loads_the_same_snapshot_as_the_journal(tmp_path: Path, durable: bool) -> None:
    path, disk = tmp_path / "journal", Disk(durable)
    with Journal(path, durable=durable, boot="one") as journal:
        assert journal.load() is disk.load() is None
        for snapshot in snapshots():
            journal.save([], snapshot)
            disk.save(snapshot)
    with Journal(path, durable=durable, boot="one") as journal:  # after a kill
        assert journal.load() == disk.load() == snapshots()[-1]


@pytest.mark.parametrize("durable", [True, False])
def test_disk_after_a_power_loss_loads_or_refuses_like_the_journal(tmp_path: Path, durable: bool) -> None:
    path, disk = tmp_path / "journal", Disk(durable)
    with Journal(path, durable=durable, boot="one") as journal:
        journal.save([], snapshots()[-1])
        disk.save(snapshots()[-1])
    disk.lose_power(Random(1))
    with Journal(path, durable=durable, boot="two") as journal:
        if durable:
            assert journal.load() == disk.load() == snapshots()[-1]
            return
        for load in (journal.load, disk.load):
            with pytest.raises(JournalError, match=r"may lack|may be missing"):
                load()
    disk.remove()
    assert disk.load() is None


def test_disk_that_is_full_raises_and_keeps_the_last_snapshot() -> None:
    disk, (first, second, _) = Disk(), snapshots()
    disk.save(first)
    disk.full = True
    with pytest.raises(JournalError, match="full"):
        disk.save(second)
    assert disk.load() == first
