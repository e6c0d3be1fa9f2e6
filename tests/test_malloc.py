"""Memory that a step frees: who trains a torch model on gradwire takes it again without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap

import pytest

from gradwire import machine, malloc

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do as they like")

WRAPPED = "gw.init(rank=0, size=1); gw.torch.DistributedDataParallel(torch.nn.Linear(2, 2))"
BACKEND = "torch.distributed.init_process_group('gradwire', store=torch.distributed.HashStore(), rank=0, world_size=1)"
SCRIPT = """
    import resource, torch
    import gradwire as gw
    {}

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        one, another = b"x" * (33 << 20), b"x" * (33 << 20)  # more than glibc keeps by itself
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first, second = faults(), faults()
    print(first > 16000, second < 1000)
"""


@pytest.mark.parametrize(
    ("start", "own", "told"),
    [
        pytest.param(WRAPPED, {}, "True True", id="DDP"),
        pytest.param(BACKEND, {}, "True True", id="backend"),
        pytest.param("gw.init(rank=0, size=1)", {}, "True False", id="neither"),
        pytest.param(BACKEND, {"MALLOC_ARENA_MAX": "2"}, "True False", id="told by the user"),
    ],
)
def test_what_a_step_frees_is_kept(start: str, own: dict[str, str], told: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))} | own
    script = textwrap.dedent(SCRIPT).format(start)
    ended = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=100)
    assert (ended.stdout.strip(), ended.returncode) == (told, 0), ended.stderr


def test_all_ranks_together_keep_a_part_of_the_machine_s_memory() -> None:
    for ranks in (1, 7, 1000):
        assert 8 * ranks * int(malloc.variables({}, ranks)["MALLOC_TRIM_THRESHOLD_"]) <= machine.memory()
