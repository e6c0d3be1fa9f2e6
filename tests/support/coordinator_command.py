"""Starts `gradwire coordinator` as a process, and reads its first line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

TOKEN = "a secret of this test"


class Process:
    """`gradwire coordinator` in its own process."""

    def __init__(self, *options: str, environ: Mapping[str, str] | None = None, clean: bool = False) -> None:
        """Start it with further variables, and with this module's `TOKEN` as its secret unless `clean`."""
        secret = {} if clean else {"GRADWIRE_TOKEN": TOKEN}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradwire", "coordinator", *options],
            env={**os.environ, **secret, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        found = re.match(r"coordinator of job (\S+) at (\S+) \(", self.line)
        self.job, self.address = (found[1], found[2]) if found else ("", "")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def said(self) -> str:
        """Return its output to stderr until it ended."""
        return self.process.communicate(timeout=30)[1]


@pytest.fixture(name="coordinate")
def coordinate_fixture() -> Iterator[Callable[..., Process]]:
    """Starts coordinators in processes of their own, and kills them after the test."""
    started: list[Process] = []

    def start(*options: str, environ: Mapping[str, str] | None = None, clean: bool = False) -> Process:
        started.append(Process(*options, environ=environ, clean=clean))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
