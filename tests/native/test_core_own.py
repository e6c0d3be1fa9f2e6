"""Runs the C++ tests of the core in native/tests. `make sanitize` runs them with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.host import native_core

SCRIPT = Path(__file__).parents[2] / "native" / "tests" / "run.sh"


@pytest.mark.slow
def test_core_passes_its_own_cpp_tests() -> None:
    if not native_core.available() or not SCRIPT.exists():
        pytest.skip("there is no core to test, or no source tree")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # CMake may be in this environment only
    if not shutil.which("cmake", path=path) or not (os.environ.get("CXX") or shutil.which("c++")):
        pytest.skip("there is no CMake or no compiler")
    environ = os.environ | {"PATH": path}
    done = subprocess.run([SCRIPT], env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_reduce_of_8_bytes_repeated" in done.stdout
