"""Lazy import of gw.jax, and the error if JAX is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradwire as gw


def python(source: str) -> str:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True).stdout


def test_gw_jax_without_jax_installed_names_the_install_command() -> None:
    source = """
import sys
sys.modules["jax"] = None  # not installed
import gradwire as gw
try: gw.jax
except ModuleNotFoundError as error: print(error)
"""
    assert python(source) == "gw.jax needs JAX, which is not installed: pip install 'gradwire[jax]'\n"


def test_gw_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'jaxx'"):
        gw.jaxx  # type: ignore[attr-defined]
