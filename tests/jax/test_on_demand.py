"""JAX is loaded by those who ask for it, and its absence is told in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradwire as gw


def python(source: str) -> str:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True).stdout


def test_without_jax_the_error_says_how_to_get_it() -> None:
    source = """
import sys
sys.modules["jax"] = None  # not installed
import gradwire as gw
try: gw.jax
except ModuleNotFoundError as error: print(error)
"""
    assert python(source) == "gw.jax needs JAX, which is not installed: pip install 'gradwire[jax]'\n"


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'jaxx'"):
        gw.jaxx  # type: ignore[attr-defined]
