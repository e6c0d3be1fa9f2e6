"""The code blocks of docs/training.md run as one program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_training_page_code_blocks_run_as_a_program(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 4
    (tmp_path / "train.py").write_text("\n".join(blocks), "utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "2", "train.py"],
        env=environ | {"OPENBLAS_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
