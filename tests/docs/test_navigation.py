"""Every page has one place in the site's navigation."""

from __future__ import annotations

import re
import runpy

from support.pages import PAGES, ROOT

NAVIGATION = runpy.run_path(str(ROOT / "docs" / "website" / "navigation.py"))


def test_navigation_places_every_page_once() -> None:
    names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES]
    toctrees = "".join(NAVIGATION["toctrees"](name, ROOT) for name in names)
    placed = re.findall(r"^/(\S+)$", toctrees, re.MULTILINE)
    assert sorted([*placed, NAVIGATION["HOME"]]) == sorted(names)
