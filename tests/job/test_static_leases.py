"""Ranks of a static job at a coordinator that stays: they renew leases, and leave when they close their group."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import gradwire as gw
from gradwire.membership.client.requests import heartbeat
from gradwire.membership.coordinator.service import Coordinator
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

TOKEN = "a token that is long enough"
SECRET = TOKEN.encode()


def trains(here: Here) -> None:
    group = gw.init(timeout=30.0)
    here.send(sum=group.all_reduce(1))
    try:
        while True:
            group.barrier()
    except gw.PeerLost as error:
        here.send_error(error)
    here.receive()
    group.close()
    here.send(closed=True)


def test_static_job_at_a_lasting_coordinator_evicts_lost_ranks_and_ends(job: StartJob) -> None:
    with Coordinator("127.0.0.1", 0, size=3, secret=SECRET, lease=1.0, lasting=True) as coordinator:

        def environ(rank: int) -> Mapping[str, str]:
            return {
                "GRADWIRE_RANK": str(rank),
                "GRADWIRE_SIZE": "3",
                "GRADWIRE_COORDINATOR": coordinator.address,
                "GRADWIRE_MEMBER": f"m{rank}",
                "GRADWIRE_TOKEN": TOKEN,
            }

        with job(trains, 3, environ=environ) as ranks:
            assert [rank.receive()["sum"] for rank in ranks] == [3, 3, 3]
            ranks[2].signal(signal.SIGKILL)
            for rank in ranks[:2]:
                assert rank.receive()["culprit"] == 2
            while (news := heartbeat(coordinator.address, [], secret=SECRET)).evicted != ("m2",):
                pass
            assert news.size == 2, "the others renew their leases although their group is broken"
            for rank in ranks[:2]:
                rank.send()
                assert rank.receive()["closed"]
            assert heartbeat(coordinator.address, [], secret=SECRET).size == 0
