"""Members and coordinators of different versions: one that does not fit is refused with a reason; the job continues."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.identity import PROTOCOL
from support.ranks import eventually
from support.versions import WITHOUT_VERSIONS, Version, copied, from_history

TRAIN = """
import time
import numpy as np
import gradwire as gw

state = {"numbers": np.zeros(4)}
run = gw.elastic(state)
for step in run.steps(1 << 30):
    with step:
        group = run.group
        state["numbers"] += group.all_reduce(np.ones(4), op="mean")
        time.sleep(0.01)
    if step.committed:
        print("step", step.index, "generation", group.generation, "size", group.size, flush=True)
"""
LONG = 60.0
JOB = "upgrade"

pytestmark = pytest.mark.slow


class Command:
    """A running `gradwire` command of some version, and its output."""

    def __init__(self, folder: Path, version: Version, *arguments: str) -> None:
        self.path = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        command = [sys.executable, "-m", "gradwire", *arguments]
        environ = version.environ | {"TMPDIR": str(folder), "GRADWIRE_JOB": JOB, "XDG_RUNTIME_DIR": str(folder)}
        environ["XDG_STATE_HOME"] = str(folder)  # of the coordinator's journal
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def steps(self) -> list[tuple[int, int, int]]:
        """Return step, generation and size of each committed step that the first worker has printed."""
        found = re.findall(r"^\[0\] step (\d+) generation (\d+) size (\d+)$", self.text, re.MULTILINE)
        return [(int(step), int(generation), int(size)) for step, generation, size in found]

    def continues(self, steps: int = 20) -> bool:
        """Wait for `steps` more committed steps, and return whether they came."""
        known = len(self.steps())
        return eventually(lambda: len(self.steps()) >= known + steps)

    def ends(self) -> int:
        return self.process.wait(LONG)


class Cluster:
    """A coordinator, and launchers that join its job."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self._folder, self._ends = folder, ends
        self.address = ""
        (folder / "train.py").write_text(TRAIN)

    def coordinator(self, version: Version) -> Command:
        started = self._start(version, "coordinator", "--size", "2", "--min", "1", "--max", "4")
        # The address is the word after "at", in all versions.
        assert eventually(lambda: re.search(r" at \S+.*\n", started.text) is not None), started.text
        self.address = started.text.partition(" at ")[2].split()[0]
        return started

    def join(self, version: Version, workers: int = 1) -> Command:
        return self._start(version, "join", "-n", str(workers), self.address, "train.py")

    def _start(self, version: Version, *arguments: str) -> Command:
        started = Command(self._folder, version, *arguments)
        self._ends.callback(_end, started.process)
        return started


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(LONG)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as ends:
        yield Cluster(tmp_path, ends)


Make = Callable[[str], Version]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return make(name), which makes a copy of the present version; "older" and "newer" copies are changed."""
    made: dict[str, Version] = {}

    def make(name: str) -> Version:
        if name not in made:
            version = made[name] = copied(tmp_path_factory.mktemp(name))
            if name in ("older", "newer"):
                number = PROTOCOL - 1 if name == "older" else PROTOCOL + 1
                version.change("identity.py", f"PROTOCOL = {PROTOCOL}", f"PROTOCOL = {number}")
            elif name == "newer between members":
                line = "from gradwire.identity import PROTOCOL, Identity"
                version.change("generation/handshake.py", line, f"{line}\nPROTOCOL += 1")
        return made[name]

    return make


@pytest.fixture(scope="session")
def without_versions(tmp_path_factory: pytest.TempPathFactory) -> Version:
    found = from_history(tmp_path_factory.mktemp("history"), WITHOUT_VERSIONS)
    if found is None:
        pytest.skip(f"revision {WITHOUT_VERSIONS} is not in this clone")
    return found


def check_refused(cluster: Cluster, present: Version, newcomer: Version, reason: str) -> None:
    """Check that a member of another version is refused while two members train, and that their job continues."""
    members = cluster.join(present, 2)
    assert members.continues(), members.text
    refused = cluster.join(newcomer)
    assert refused.ends() != 0, refused.text
    assert reason in refused.text
    assert members.continues(), members.text
    assert members.steps()[-1][1:] == (1, 2), "the members must not form a new generation"


@pytest.mark.parametrize(
    ("coordinator", "member", "age"),
    [
        ("present", "older", "an older"),
        ("present", "newer", "a newer"),
        ("older", "present", "a newer"),
        ("newer", "present", "an older"),
    ],
)
def test_member_of_another_version_is_refused_and_the_job_continues(
    cluster: Cluster, make: Make, coordinator: str, member: str, age: str
) -> None:
    cluster.coordinator(make(coordinator))
    check_refused(cluster, make(coordinator), make(member), f"runs {age} gradwire")


def test_member_with_another_set_up_protocol_is_left_out_and_the_job_continues(cluster: Cluster, make: Make) -> None:
    """The coordinator admits it, so only the members notice."""
    cluster.coordinator(make("present"))
    members = cluster.join(make("present"), 2)
    assert members.continues(), members.text
    refused = cluster.join(make("newer between members"))
    assert eventually(lambda: "uses set-up protocol" in members.text), members.text
    assert members.continues(), members.text
    assert members.steps()[-1][2] == 2
    assert refused.steps() == []


def test_member_without_versions_is_refused_and_the_job_continues(
    cluster: Cluster, make: Make, without_versions: Version
) -> None:
    cluster.coordinator(make("present"))
    check_refused(cluster, make("present"), without_versions, "runs an older gradwire")


def test_members_of_this_version_train_at_a_coordinator_without_versions(
    cluster: Cluster, make: Make, without_versions: Version
) -> None:
    cluster.coordinator(without_versions)
    members = cluster.join(make("present"), 2)
    assert members.continues(), members.text


def test_member_without_versions_that_the_coordinator_admits_is_left_out_by_its_peers(
    cluster: Cluster, make: Make, without_versions: Version
) -> None:
    cluster.coordinator(without_versions)
    members = cluster.join(make("present"), 2)
    assert members.continues(), members.text
    newcomer = cluster.join(without_versions)
    assert eventually(lambda: "could not be set up" in members.text), members.text
    assert members.continues(), members.text
    assert members.steps()[-1][2] == 2
    assert newcomer.steps() == []
