"""Tests of the rate limit for log lines about refused callers."""

from __future__ import annotations

import logging

import pytest

from gradwire.security.refusal_log import PER_MINUTE, RefusalLog


def test_refusal_log_flood_is_cut_off_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    log = RefusalLog(logging.getLogger("gradwire.test"), clock=lambda: now)
    for number in range(3 * PER_MINUTE):
        log.log("refused %d", number)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *(f"refused {number}" for number in range(PER_MINUTE)),
        "further refusals within this minute are not logged",
    ]
    caplog.clear()
    now += 61.0
    log.log("refused %d", 7)
    assert [record.getMessage() for record in caplog.records] == ["refused 7"]
