"""Every Python block of the documentation is a complete program, and runs on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.documents import ROOT, Block, code_blocks, run_program

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAST = ("README.md", "concepts.md", "group.md")  # all other pages are for `make verify`: each program takes seconds
SLOW = ("import torch", "import jax", "time.sleep")
PROGRAMS = [
    pytest.param(
        block,
        id=f"{page.stem}-line-{block.line}",
        marks=[pytest.mark.slow] if page.name not in FAST or any(one in block.text for one in SLOW) else [],
    )
    for page in PAGES
    for block in code_blocks(page, "python")
]


@pytest.mark.parametrize("block", PROGRAMS)
def test_page_program_runs(block: Block, tmp_path: Path) -> None:
    done = run_program(block, tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
