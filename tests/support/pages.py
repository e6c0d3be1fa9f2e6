"""The pages of the project, and what in them is prose."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md")),
    ]
)
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)


def title(page: Path) -> str:
    """The path of a page inside of the repository."""
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The text of a page, with an empty line in place of each line of a fenced block: line numbers stay."""
    return _FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text("utf-8"))
