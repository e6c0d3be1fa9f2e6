"""The page on environment variables documents every variable that the code reads."""

from __future__ import annotations

import re

from support.documents import ROOT


def test_environment_variables_page_documents_every_variable() -> None:
    code = "".join(file.read_text("utf-8") for file in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "environment-variables.md").read_text("utf-8")
    assert [name for name in sorted(set(re.findall(r"GRADWIRE_[A-Z_]+", code))) if f"`{name}`" not in page] == []
