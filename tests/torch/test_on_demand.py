"""The error of gw.torch if PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import sys
sys.modules["torch"] = None  # not installed
import gradwire as gw
gw.torch
"""


def test_gw_torch_without_torch_installed_names_the_command_for_the_cpu_build() -> None:
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "gw.torch needs PyTorch, which is not installed." in done.stderr
    assert done.stderr.endswith("pip install torch --index-url https://download.pytorch.org/whl/cpu\n")
