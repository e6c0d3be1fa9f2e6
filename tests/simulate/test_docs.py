"""docs/simulation.md: its commands, its table of rare faults, and its example with the pytest fixture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.simulate import __main__ as command
from gradwire.simulate.faults import RARE

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
COMMANDS = re.findall(r"^    python -m gradwire\.simulate (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_simulation_page_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each command with one seed."""
    arguments = line.split("#")[0].split()
    assert command.main([*arguments, "--seeds", "1"]) == 0
    assert "1 seeds in" in capsys.readouterr().out


def test_simulation_page_lists_every_rare_fault() -> None:
    kinds = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert kinds == list(RARE)


def test_simulation_page_example_passes(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "test_example.py").write_text(code, "utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"6 passed" in done.stdout
