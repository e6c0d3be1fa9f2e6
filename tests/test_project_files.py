"""The files around the code agree with each other: version numbers, supported Pythons, make targets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import gradwire as gw

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_version_is_the_same_in_every_file() -> None:
    changelog = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    citation = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert {gw.__version__, PROJECT["version"], changelog[0], *citation} == {gw.__version__}


def test_workflow_runs_only_existing_make_targets() -> None:
    used = re.findall(r"(?:run|entry): make ([a-z]+)", WORKFLOW + (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert {"test", "sanitize", "docs", "dist", "lint"} <= set(used) <= TARGETS


def test_workflow_tests_every_python_that_the_package_declares() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = re.search(r"python: \[(.*)\]", WORKFLOW)
    assert matrix is not None
    assert re.findall(r"3\.\d+", matrix[1]) == declared
