"""MemberSession in an elastic job whose generations fail to form; the coordinator and the other members are faked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire.errors import ConfigError, NoConnection, Timeout
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.establish import Endpoint
from gradwire.job import process_hooks
from gradwire.job.address import Address
from gradwire.job.config import JobConfig
from gradwire.job.member_session import MemberSession
from gradwire.job.session_protocol import SET_UP_SECONDS
from gradwire.membership import Assembly, Member
from gradwire.membership.client import requests


class Harness:
    """Fakes the coordinator and the other members. Set-up raises each of `endings` in turn, then succeeds."""

    def __init__(self, patch: pytest.MonkeyPatch, *endings: BaseException, numbers: Iterator[int]) -> None:
        self.claims: list[dict[str, Any]] = []
        self.left: list[Any] = []
        self.deadlines: list[float] = []
        self._endings, self._numbers = list(endings), numbers
        patch.setenv("GRADWIRE_TOKEN", "a token for this test only")
        patch.setattr(requests, "register", self._register)
        patch.setattr(requests, "unregister", lambda *place, **facts: self.left.append(facts))
        patch.setattr(process_hooks, "set_current", lambda group, initialised_at: group)
        patch.setattr("gradwire.membership.client.worker_lease.Lease.start", lambda lease: None)

    def _register(self, address: str, member: Member, **facts: Any) -> Assembly:
        self.claims.append(facts)
        other = Member("other", 1, "elsewhere", "elsewhere", 2, "127.0.0.1:9")
        mine = Member(member.id, 0, member.host, member.hostname, member.pid, member.address)
        return Assembly("job", next(self._numbers), 0, (mine, other), bytes(16))

    def connect(self, endpoint: Endpoint, config: JobConfig, deadline: float) -> Any:
        """Replace `connect_member`, and return the endpoint in place of a group."""
        self.deadlines.append(deadline)
        endpoint.transport.close()
        if self._endings:
            if endpoint.membership is not None:
                endpoint.membership.set_up_failed(())
            raise self._endings.pop(0)
        return endpoint

    def join_next(self, deadline: float) -> ElasticMembership:
        """Join a generation, close it and return its membership."""
        config = JobConfig(elastic=True, served=True, address=Address("127.0.0.1", 9), size=None, rank=None)
        endpoint: Any = MemberSession(config, self.connect).join_next(deadline)
        assert self.left == [], "a failed set-up must not make the member leave the job"
        membership: ElasticMembership = endpoint.membership
        membership.close()
        return membership


def silent() -> NoConnection:
    return NoConnection("rank 1 did not connect in time", peer=1)


def refused() -> NoConnection:
    error = NoConnection("rank 1 has registered and then ended", peer=1)
    error.__cause__ = ConnectionRefusedError()
    return error


@pytest.mark.parametrize(
    ("ending", "lost"),
    [(silent(), ("other",)), (refused(), ()), (Timeout("init did not finish", culprit=1), ("other",))],
    ids=["silent", "refused", "late"],
)
def test_member_session_reports_a_member_that_was_silent_during_set_up_as_lost(
    ending: BaseException, lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(monkeypatch, ending, numbers=iter((1, 2)))
    harness.join_next(1e9)
    assert [(one["generation"], one["lost"], one["lacks_state"]) for one in harness.claims] == [
        (0, (), False),
        (1, lost, False),
    ]
    assert harness.left != [], "closing the group leaves the job"


def test_member_session_after_a_failed_join_registers_as_lacking_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(monkeypatch, silent(), silent(), numbers=iter((3, 4, 5)))
    assert harness.join_next(1e9).joined
    assert [one["lacks_state"] for one in harness.claims] == [False, True, True]


def test_member_session_set_up_of_an_elastic_job_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(monkeypatch, numbers=iter((1,)))
    before = time.monotonic()
    assert not harness.join_next(1e9).joined
    assert harness.deadlines[0] <= time.monotonic() + SET_UP_SECONDS
    assert harness.deadlines[0] >= before + SET_UP_SECONDS


def test_member_session_agreed_remote_address_without_tls_or_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's store is not trusted: an address from it that is not on this machine gets no proof of the secret."""
    harness = Harness(monkeypatch, numbers=iter((1,)))
    config = JobConfig(address=Address("127.0.0.1", 1), size=2, rank=1, address_taken=True)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:29500 is not a loopback address, and links are not encrypted"):
        MemberSession(config, harness.connect, lambda offered, timeout: "192.0.2.1:29500").join_next(1e9)
    monkeypatch.delenv("GRADWIRE_TOKEN")
    insecure = dataclasses.replace(config, insecure=True)
    with pytest.raises(ConfigError, match="a job on several machines needs a secret"):
        MemberSession(insecure, harness.connect, lambda offered, timeout: "192.0.2.1:29500").join_next(1e9)
    assert harness.claims == []
    MemberSession(config, harness.connect, lambda offered, timeout: "127.0.0.1:29500").join_next(1e9)
    assert len(harness.claims) == 1
