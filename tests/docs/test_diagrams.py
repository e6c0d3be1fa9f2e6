"""The committed diagrams are what docs/diagrams/draw.py draws from the code of today."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from support.pages import ROOT

FOLDER = ROOT / "docs" / "diagrams"
NAMES = sorted(file.name for file in FOLDER.glob("*.svg"))


def test_diagrams_are_drawn_from_the_code_of_today() -> None:
    command = [sys.executable, str(FOLDER / "draw.py"), "--check"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", NAMES)
def test_diagram_has_a_title_and_is_on_the_architecture_page(name: str) -> None:
    assert ET.parse(FOLDER / name).getroot().find("{http://www.w3.org/2000/svg}title") is not None
    assert f"](diagrams/{name})" in (ROOT / "docs" / "architecture.md").read_text("utf-8")
