"""Tests the atheris harness on a machine without atheris."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fuzz.atheris.__main__ import main


def test_harness_without_atheris_exits_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz.atheris", "--seconds", "1"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("skipped: atheris is not installed")
