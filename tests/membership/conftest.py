"""Fixtures for a rendezvous over real sockets: coordinators, their databases, and a log that can be waited for."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from support.coordinators import captured_fixture as captured_fixture
from support.coordinators import serve_fixture as serve_fixture


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Collects the SQLite connections opened during the test, so that it can limit them. A journal's is the last."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def observed(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", observed)
    return opened
