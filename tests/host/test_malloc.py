"""Tests the settings of malloc: memory that a training step frees is reused without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from gradwire.host import machine, malloc, native_core
from gradwire.launch.worker_process import Task
from support.launch_jobs import run, written

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

WRAPPED = (
    "import gradwire as gw, torch; gw.init(rank=0, size=1); gw.torch.DistributedDataParallel(torch.nn.Linear(2, 2))"
)
BACKEND = (
    "from torch import distributed as d; d.init_process_group('gradwire', store=d.HashStore(), rank=0, world_size=1)"
)
SCRIPT = """
    import resource
    {}

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        one, another = b"x" * (33 << 20), b"x" * (33 << 20)  # more than glibc keeps by default
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first, second = faults(), faults()
    print(first > 16000, second < 1000)
"""


def output_of(script: str, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a script with these variables and no other option of malloc; return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ = inherited | dict(options)
    ended = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize(
    ("start", "options", "expected"),
    [
        pytest.param(WRAPPED, {}, "True True", id="DDP"),
        pytest.param(BACKEND, {}, "True True", id="backend"),
        pytest.param("import gradwire as gw; gw.init(rank=0, size=1)", {}, "True False", id="neither"),
        pytest.param(BACKEND, {"MALLOC_PERTURB_": "0"}, "True False", id="set by the user"),
    ],
)
def test_malloc_settings_of_ddp_and_backend_keep_freed_memory_unless_set_by_the_user(
    start: str, options: dict[str, str], expected: str
) -> None:
    assert output_of(textwrap.dedent(SCRIPT).format(start), options) == expected


def test_malloc_settings_keep_memory_freed_by_a_launched_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    script = written(tmp_path, SCRIPT.format("pass"))
    assert run(Task.script(script), 1).out.splitlines() == ["[0] True True"]


def test_malloc_settings_of_all_ranks_keep_at_most_an_eighth_of_the_memory() -> None:
    for ranks in (1, 7, 1000):
        assert 8 * ranks * int(malloc.variables({}, ranks)["MALLOC_TRIM_THRESHOLD_"]) <= machine.memory()


ALIGNED = """
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_long]
    libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]

    def aligned(size):
        found = ctypes.c_void_p()
        assert libc.posix_memalign(found, 64, size) == 0
        return found.value

    before = libc.sbrk(0)
    for _ in range(50):
        large, small = [aligned(4 << 20), aligned(1 << 20)], [libc.malloc(size) for size in (40, 72, 24, 88, 56)]
        for block in large:
            libc.free(block)
    print(libc.sbrk(0) - before < 100 << 20)  # 250 MiB in all
"""


def test_aligned_memory_freed_by_a_worker_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert run(Task.script(written(tmp_path, ALIGNED)), 1).out.splitlines() == ["[0] True"]


TRAINED = """
    import ctypes

    import gradwire as gw, torch

    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_long]
    torch.set_num_threads(1)
    gw.init(rank=0, size=1)
    model = gw.torch.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))))
    for parameter in model.parameters():  # small allocations between the gradients, never freed
        parameter.register_hook(lambda gradient: [libc.malloc(size) for size in (40, 72, 24, 88, 56)] and None)
    ends = []
    for _ in range(50):
        model(torch.ones(512, 512)).sum().backward()
        model.zero_grad()
        ends.append(libc.sbrk(0))
    print(ends[-1] - ends[0] < 64 << 20)  # the small allocations are less than a megabyte in total
"""


@pytest.mark.skipif(not native_core.available(), reason="needs the native core")
def test_aligned_memory_is_reused_in_a_process_without_malloc_variables() -> None:
    assert output_of(textwrap.dedent(TRAINED)) == "True"


@pytest.mark.parametrize(
    ("version", "disabled"), [("glibc 2.36", True), ("glibc 2.39", False), ("glibc 2.40.1", False), (None, False)]
)
def test_malloc_variables_disable_the_tcache_only_for_older_glibc(
    version: str | None, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: version)
    assert ("GLIBC_TUNABLES" in malloc.variables({}, 1)) is disabled
    assert "GLIBC_TUNABLES" not in malloc.variables({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, 1)
