"""Two hosts, as network namespaces, and the cable between them is cut: both sides say so within a second."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gradwire import core

LONG = 60.0
SOON = 5.0  # seconds; it takes less than half of one
PROGRAM = """
import json, os, sys, time
import numpy as np
import gradwire as gw

rank, port, nbytes = map(int, sys.argv[1:])
group = gw.init(rank, 4, f"10.77.0.1:{port}", insecure=True)
x = np.ones(nbytes // 4, np.float32)
group.barrier()
print("ready", flush=True)
try:
    while True:
        group.all_reduce(x, op="mean")
except gw.GradwireError as error:
    said = {"error": type(error).__name__, "culprit": error.culprit, "at": time.monotonic(), "text": str(error)}
    print(json.dumps(said), flush=True)
sys.stdin.read()
os._exit(0)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LONG)


@pytest.fixture(name="hosts")
def hosts_fixture() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them; it ends at "cable" in both."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("namespaces need root and iproute2")
    names = tuple(f"gradwire-{secrets.token_hex(4)}" for _ in range(2))
    with contextlib.ExitStack() as ends:
        try:
            for name in names:
                ip("netns", "add", name)
                ends.callback(ip, "netns", "del", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"there are no namespaces to be had here: {error.stderr.decode()}")
        yield names[0], names[1]


@pytest.mark.slow
@pytest.mark.skipif(not core.available(), reason="without it, silence counts after 10 s only")
@pytest.mark.parametrize("nbytes", [8, 4 << 20])
def test_each_side_of_a_cut_names_the_lowest_rank_it_cannot_reach(hosts: tuple[str, str], nbytes: int) -> None:
    token = secrets.token_hex(32)
    with contextlib.ExitStack() as ends:
        ranks = []
        for rank in range(4):
            host = hosts[rank // 2]
            environ = os.environ | {"GRADWIRE_HOST": host, "GRADWIRE_TOKEN": token, "GRADWIRE_JOB": "cut"}
            command = ["ip", "netns", "exec", host, sys.executable, "-c", PROGRAM, str(rank), "7700", str(nbytes)]
            process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ends.callback(process.communicate)
            ends.callback(process.kill)
            ranks.append(process)
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        ip("-n", hosts[0], "link", "set", "cable", "down")
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert (said["error"], said["culprit"]) == ("PeerLost", 2 if rank < 2 else 0), said
            assert "(frozen or cut off)" in said["text"]
            assert said["at"] - began < SOON
