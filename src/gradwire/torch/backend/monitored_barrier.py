"""torch's monitored barrier: rank 0 collects a message from each rank and names the missing ones.

The group stays usable after a failure.
"""

from __future__ import annotations

import time

import numpy as np

from gradwire.errors import GradwireError, Timeout
from gradwire.group import Group
from gradwire.group.point_to_point import MAX_TAG

ARRIVED, RELEASED = MAX_TAG, MAX_TAG - 1  # larger than any tag that torch uses
SHORTEST = 1e-3


class MonitoredBarrierFailed(Timeout, RuntimeError):
    """A rank did not reach a monitored barrier in time. It is a RuntimeError, as in torch."""


def monitored_barrier(group: Group, seconds: float, *, report_all: bool) -> None:
    """Return when all ranks have called it.

    On a timeout, rank 0 raises an error that names the first missing rank, or with `report_all` every missing rank.
    """
    token = np.zeros(1, np.uint8)
    if group.rank != 0:
        try:
            group.send(token, 0, ARRIVED, timeout=seconds or SHORTEST)
            group.recv(token, 0, RELEASED, timeout=seconds or SHORTEST)
        except GradwireError as error:
            raise MonitoredBarrierFailed(
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0 (the error of rank 0 names the missing ranks): {error}",
                seconds=seconds,
            ) from error
        return
    missing = _missing(group, seconds, report_all)
    if missing:
        ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise MonitoredBarrierFailed(
            f"{ranks} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms", peer=missing[0], seconds=seconds
        )
    for rank in range(1, group.size):
        group.send(token, rank, RELEASED)


def _missing(group: Group, seconds: float, report_all: bool) -> list[int]:
    """Return the ranks that have not arrived in time: the first one, or with `report_all` every one."""
    deadline = time.monotonic() + seconds
    missing: list[int] = []
    for rank in range(1, group.size):
        left = deadline - time.monotonic()
        if left <= 0 and not missing:
            raise MonitoredBarrierFailed(
                f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:.0f} ms", seconds=seconds
            )
        try:
            group.recv(np.zeros(1, np.uint8), rank, ARRIVED, timeout=max(SHORTEST, left))
        except Timeout:
            missing.append(rank)
            if not report_all:
                break
    return missing
