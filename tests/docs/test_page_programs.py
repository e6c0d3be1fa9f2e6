"""Every Python block of the documentation is a complete program, and runs on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.documents import ROOT, Block, code_blocks, run_program

PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = [(page.stem, block) for page in PAGES for block in code_blocks(page, "python")]


@pytest.mark.parametrize(("page", "block"), PROGRAMS, ids=[f"{page}-line-{block.line}" for page, block in PROGRAMS])
def test_page_program_runs(page: str, block: Block, tmp_path: Path) -> None:
    done = run_program(block, tmp_path)
    assert done.returncode == 0, f"{page}, line {block.line}\n{done.stdout}{done.stderr}"
