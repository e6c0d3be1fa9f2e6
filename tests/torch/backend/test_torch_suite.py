"""The backend tests of torch itself, run on gradwire: a test that passes on Gloo also passes here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "support" / "torch_own_suite.py"
PARTS = 3


def outcomes(*arguments: str) -> dict[str, dict[str, Any]]:
    """Run the suite, and return the outcome of each test."""
    # A new session, so that processes that hang can be ended together.
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=580)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert "passed" in lines[-1], f"the suite did not end: {output[-3000:]}"
    return {line["test"]: line for line in lines[:-1]}


def failed(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: one["text"] for name, one in found.items() if one["outcome"] == "failed"}


@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("ranks", [2, 4])
def test_backend_torch_suite_fails_no_test_that_passes_on_gloo(ranks: int, part: int) -> None:
    found = outcomes("--ranks", str(ranks), "--open", "--part", f"{part}/{PARTS}")
    bad = failed(found)
    if bad:  # a test must pass on gradwire only if it passes on Gloo
        gloos = failed(outcomes("--backend", "gloo", "--ranks", str(ranks), "--open", "--only", *bad))
        bad = {name: text for name, text in bad.items() if name not in gloos}
    assert not bad, "\n".join(f"{name}: {text}" for name, text in bad.items())
    assert sum(one["outcome"] == "passed" for one in found.values()) > 25
