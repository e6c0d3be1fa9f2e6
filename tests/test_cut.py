"""The network between two hosts is cut: each side raises PeerLost, and names the lowest rank that it cannot reach."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import numpy as np
import pytest

import gradwire as gw
from gradwire import core
from namespaces import Hosts, enter
from namespaces import hosts_fixture as hosts_fixture
from processes import Here, StartJob
from processes import job_fixture as job_fixture
from processes import zygote_fixture as zygote_fixture

SIZE = 4  # ranks: 0 and 1 on one host, 2 and 3 on the other
PORT = 7077  # in a network that nobody else has
SOON = 5.0  # seconds; it takes half of one


def join(hosts: list[int]) -> gw.Group:
    enter(hosts[int(os.environ["GRADWIRE_RANK"]) // 2])
    return gw.init()


def reduces(here: Here, hosts: list[int], nbytes: int) -> None:
    """Reduce until that fails, and stay: what others notice must be the cut, and not the end of this process."""
    group = join(hosts)
    x = np.ones(nbytes // 4, np.float32)
    group.all_reduce(x)
    here.tell(ready=True)
    try:
        while True:
            group.all_reduce(x, op="mean")
    except gw.GradwireError as error:
        here.tell_error(error)
    here.hear()


def waits(here: Here, hosts: list[int], nbytes: int) -> None:
    """Wait for a message of a rank on the other host: no data is on its way, so no loss of it is noticed."""
    group = join(hosts)
    group.barrier()
    here.tell(ready=True)
    try:
        group.recv(np.zeros(nbytes), src=(group.rank + 2) % SIZE)
    except gw.GradwireError as error:
        here.tell_error(error)
    here.hear()


@pytest.mark.skipif(not core.available(), reason="without the core, silence counts after 10 s only")
@pytest.mark.parametrize("how", ["cut", "unplug"])
@pytest.mark.parametrize(("body", "nbytes"), [(reduces, 8), (reduces, 16 << 20), (waits, 8)])
def test_both_sides_of_a_cut_name_a_rank_beyond_it(
    job: StartJob, hosts: Hosts, body: Callable[..., None], nbytes: int, how: str
) -> None:
    token = secrets.token_hex(32)

    def environ(rank: int) -> dict[str, str]:
        return {
            "GRADWIRE_RANK": str(rank),
            "GRADWIRE_SIZE": str(SIZE),
            "GRADWIRE_ADDRESS": f"{hosts.address(0)}:{PORT}",
            "GRADWIRE_HOST": f"host {rank // 2}",
            "GRADWIRE_TOKEN": token,
            "GRADWIRE_INSECURE": "1",
        }

    with job(body, SIZE, hosts.pids, nbytes, environ=environ) as ranks:
        for rank in ranks:
            assert rank.hear() == {"ready": True}
        began = time.monotonic()
        getattr(hosts, how)()
        for rank in ranks:
            told = rank.hear()
            beyond = 2 if rank.number < 2 else 0
            assert (told["error"], told["culprit"]) == ("PeerLost", beyond), told["text"]
            assert told["at"] - began < SOON, told["text"]
