"""docs/simulation.md: its table of rare faults. tests/docs runs its commands and its example."""

from __future__ import annotations

import re
from pathlib import Path

from gradwire.simulate.faults import RARE

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"


def test_simulation_page_lists_every_rare_fault() -> None:
    kinds = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert kinds == list(RARE)
