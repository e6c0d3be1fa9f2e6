"""For all tests: nothing may be left behind, and Hypothesis behaves the same on every machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import leftovers, ranks

# Ranks are threads and processes of a shared machine: a slow example says nothing.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

# Whoever starts the tests from within a job of any launcher does not make them part of it; but may do without the core.
STARTED_BY = ("GRADWIRE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")
for _name in set(os.environ) - {"GRADWIRE_PURE"}:
    if _name.startswith(STARTED_BY) or _name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}:
        del os.environ[_name]

# Nor does what somebody has tuned here change what tests see.
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no-such-folder")

# A shell in the background, or nohup, makes all our processes deaf to signals that some tests are about. What a process
# handles, its children get back as it should be.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# What is on its way out when a test returns (a thread past its last statement) gets this long.
GRACE = 30.0


@pytest.fixture(scope="session", name="run_ranks")
def run_ranks_fixture() -> object:
    """run_ranks(groups, fn): fn(group) for each group in a thread of its own; results by rank."""
    return ranks.run_ranks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread that is no daemon, or a listening socket."""
    before = leftovers.everything()
    yield
    left = _left(before)
    deadline = time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = _left(before)
    if left:
        leftovers.end([pid for pid in left if isinstance(pid, int)])
        pytest.fail("the test left behind: " + ", ".join(left.values()), pytrace=False)


def _left(before: dict[object, str]) -> dict[object, str]:
    return {key: name for key, name in leftovers.everything().items() if key not in before}
