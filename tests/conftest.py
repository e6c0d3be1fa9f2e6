"""Settings and fixtures of all tests: a clean environment, Hypothesis profiles, and a check for leftovers."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import leftovers, ranks

# Ranks are threads and processes on a shared machine, so the duration of an example means nothing.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

# Tests that are started inside a job of a launcher must not join that job. GRADWIRE_PURE is kept, for tests without the
# native core.
PREFIXES = ("GRADWIRE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")
for _name in set(os.environ) - {"GRADWIRE_PURE"}:
    if _name.startswith(PREFIXES) or _name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}:
        del os.environ[_name]

# A tuning table of this machine must not change the results of tests.
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no-such-folder")

# Coordinators that tests start must not resume jobs of this user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gradwire-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Background shells and nohup make processes ignore signals that some tests need, and children inherit ignored signals.
# A signal with a handler is reset to its default in children.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A thread or process that is about to end when a test returns may take this many seconds.
GRACE = 30.0


@pytest.fixture(scope="session", name="run_ranks")
def run_ranks_fixture() -> object:
    """run_ranks(groups, fn) calls fn(group) for each group, each in its own thread, and returns the results by rank."""
    return ranks.run_ranks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread that is not a daemon, or a listening socket."""
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
