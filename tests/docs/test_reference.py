"""The API reference documents all public names, and no name that does not exist."""

from __future__ import annotations

import pkgutil
import re

import pytest

import gradwire as gw
from gradwire.simulate import fixture
from support.pages import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data|py:module):: (gradwire\.[\w.]+)$", re.MULTILINE)
DOCUMENTED = [name for page in PAGES for name in DIRECTIVE.findall(page.read_text("utf-8"))]
FRAMEWORKS = ("jax", "torch")


def test_reference_documents_every_public_name() -> None:
    assert {f"gradwire.{name}" for name in (*gw.__all__, *FRAMEWORKS)} <= set(DOCUMENTED)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_reference_documents_every_public_name_of_a_framework(framework: str) -> None:
    pytest.importorskip(framework)
    module = getattr(gw, framework)
    names = {f"gradwire.{framework}.{name}" for name in module.__all__ if callable(getattr(module, name))}
    assert names <= set(DOCUMENTED)


def test_reference_documents_each_name_once() -> None:
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_reference_name_exists(name: str) -> None:
    framework = name.split(".")[1]
    if framework in FRAMEWORKS:
        pytest.importorskip(framework)
    assert pkgutil.resolve_name(name) is not None


def test_reference_documents_the_pytest_fixture() -> None:
    page = (ROOT / "docs" / "reference" / "testing.md").read_text("utf-8")
    assert callable(fixture.Ranks())
    assert ".. py:function:: gradwire_ranks(" in page
