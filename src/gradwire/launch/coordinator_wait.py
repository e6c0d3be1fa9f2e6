"""Waits until the coordinator of a job answers, before any worker is started, and reports how long it will wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradwire.errors import NoConnection
from gradwire.membership.client.requests import serving
from gradwire.membership.client.session import Secret
from gradwire.security.credentials import Credentials

JOIN_SECONDS = 30.0  # that `gradwire join` waits for a coordinator
FIRST_REPORT = 1.0  # seconds without an answer before the first line
REPORT_SECONDS = 5.0  # between two lines


def await_coordinator(
    address: str,
    secret: Secret,
    credentials: Credentials | None,
    seconds: float,
    report: Callable[[str], None],
    *,
    until: str = "",
) -> None:
    """Return when the coordinator at `address` answers and has proved the secret.

    Raise `NoConnection` if none answers within `seconds`, and `Refused` at once if a program there is not the
    coordinator of this job. `report` gets lines with the time that is left; `until` is added to them.
    """
    deadline = time.monotonic() + seconds
    pause = min(FIRST_REPORT, seconds)
    while True:
        left = deadline - time.monotonic()
        try:
            serving(address, secret=secret, timeout=max(0.1, min(pause, left)), credentials=credentials)
            return
        except NoConnection as error:
            if type(error) is not NoConnection:  # Refused
                raise
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoConnection(
                    f"no coordinator answered at {address} within {seconds:g} s: check the address, and that the job "
                    "runs there",
                    operation="rendezvous",
                    seconds=seconds,
                ) from error
        pause = REPORT_SECONDS
        report(f"no coordinator answers at {address}{until}; trying for {left:.0f} s more")
