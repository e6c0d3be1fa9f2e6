"""torch's monitored barrier: rank 0 hears from all ranks and names the missing ones. The group stays usable."""

from __future__ import annotations

import time

import numpy as np

from gradwire.errors import GradwireError, Timeout
from gradwire.group import Group
from gradwire.group.point_to_point import MAX_TAG

HERE, GO_ON = MAX_TAG, MAX_TAG - 1  # no tag of torch's is as large
SHORTEST = 1e-3


class MonitoredBarrierFailed(Timeout, RuntimeError):
    """Somebody did not come to a monitored barrier in time; a RuntimeError as in torch."""


def monitored_barrier(group: Group, seconds: float, *, everybody: bool) -> None:
    """Return when all ranks have called it; rank 0's error names the first that has not, or, if asked to, all."""
    token = np.zeros(1, np.uint8)
    if group.rank != 0:
        try:
            group.send(token, 0, HERE, timeout=seconds or SHORTEST)
            group.recv(token, 0, GO_ON, timeout=seconds or SHORTEST)
        except GradwireError as error:
            raise MonitoredBarrierFailed(
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0, which knows who is missing: {error}",
                seconds=seconds,
            ) from error
        return
    missing = _missing(group, seconds, everybody)
    if missing:
        ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise MonitoredBarrierFailed(
            f"{ranks} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms", peer=missing[0], seconds=seconds
        )
    for rank in range(1, group.size):
        group.send(token, rank, GO_ON)


def _missing(group: Group, seconds: float, everybody: bool) -> list[int]:
    """Who has not come in time: the first, or all."""
    deadline = time.monotonic() + seconds
    missing: list[int] = []
    for rank in range(1, group.size):
        left = deadline - time.monotonic()
        if left <= 0 and not missing:
            raise MonitoredBarrierFailed(
                f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:.0f} ms", seconds=seconds
            )
        try:
            group.recv(np.zeros(1, np.uint8), rank, HERE, timeout=max(SHORTEST, left))
        except Timeout:
            missing.append(rank)
            if not everybody:
                break
    return missing
