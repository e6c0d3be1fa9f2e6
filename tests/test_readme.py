"""Tests README and docs: the example runs, and all variables are documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_readme_example_runs_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[0], "utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_environment_variables_page_documents_every_variable() -> None:
    code = "".join(file.read_text("utf-8") for file in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "environment-variables.md").read_text("utf-8")
    assert [name for name in sorted(set(re.findall(r"GRADWIRE_[A-Z_]+", code))) if f"`{name}`" not in page] == []
