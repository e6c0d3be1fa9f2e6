"""Tests of newcomers that would break a running job: they are refused with a reason that names the remedy."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradwire.identity import PROTOCOL
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Assembly, Claim, Member, Waiting
from support.membership_claims import RUN, order, pass_time, reason, waits, worker

OTHER_RUN = b"o" * 16


def elastic(start: int = 2) -> Membership:
    return Membership("job", RUN, start=start, minimum=1, maximum=8, settle=0.0)


def claim(name: str, transport: str = "auto", *, address: str = "127.0.0.1:5000", host: str = "machine") -> Claim:
    made = worker(name)
    return replace(made, member=replace(made.member, address=address, host=host), transport=transport)


def running(*transports: str) -> Membership:
    """Return a job in its first generation, with a member for each transport."""
    state = elastic(len(transports))
    for name, transport in zip("abcd", transports, strict=False):
        state.register(claim(name, transport), 0.0)
    assert state.generation == 1
    return state


@pytest.mark.parametrize(
    ("protocol", "said"),
    [(0, "runs an older gradwire"), (PROTOCOL + 1, r"runs a newer gradwire \(9.9\)")],
    ids=["older", "newer"],
)
def test_claim_of_another_protocol_is_refused(protocol: int, said: str) -> None:
    state = running("auto", "auto")
    refused = reason(state.register(replace(claim("new"), protocol=protocol, version="9.9" * (protocol > 0)), 1.0))
    assert said.replace("\\", "") in refused
    assert "Install the same gradwire" in refused
    assert state.heartbeat("ab", 1.0).joiners == 0


@pytest.mark.parametrize("address", ["", "nonsense", "name:80", "127.0.0.1:0", "127.0.0.1:70000", "127.0.0.1", "::1:5"])
def test_claim_with_an_unusable_data_address_is_refused(address: str) -> None:
    assert "has no usable data address" in reason(elastic().register(claim("new", address=address), 0.0))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "[fe80::1%eth0]:5"])
def test_claim_with_a_usable_data_address_is_accepted(address: str) -> None:
    assert waits(elastic().register(claim("new", address=address), 0.0))


def test_claim_without_data_plane_in_a_job_that_exchanges_data_is_refused() -> None:
    refused = reason(running("auto", "tcp").register(claim("node", "", address=""), 1.0))
    assert "has no data address" in refused
    assert "gradwire join" in refused


def test_claim_with_data_plane_in_a_membership_only_job_is_refused() -> None:
    assert "the members of this job bring their own" in reason(running("", "").register(claim("new"), 1.0))


def test_membership_only_job_admits_newcomers_without_address() -> None:
    state = running("", "")
    assert waits(state.register(claim("node", "", address=""), 1.0))
    assert state.heartbeat("ab", 1.0).joiners == 1


def test_worker_node_that_waits_first_does_not_block_training_members() -> None:
    state = elastic(2)
    node = claim("node", "", address="")
    assert waits(state.register(node, 0.0))
    assert waits(state.register(claim("a"), 0.1))
    assert "has no data address" in reason(state.register(node, 0.2))
    assert order(state.register(claim("b"), 0.3)) == ["a", "b"]


@pytest.mark.parametrize(
    ("here", "newcomer", "host"),
    [("auto", "shm", "other"), ("tcp", "shm", "machine"), ("shm", "auto", "other"), ("shm", "tcp", "machine")],
)
def test_newcomer_that_cannot_share_memory_where_a_member_requires_it_is_refused(
    here: str, newcomer: str, host: str
) -> None:
    refused = reason(running(here, here).register(claim("new", newcomer, host=host), 1.0))
    assert "requires transport 'shm'" in refused
    assert "Use transport 'auto'" in refused


@pytest.mark.parametrize(("here", "newcomer"), [("auto", "grpc"), ("grpc", "tcp"), ("shm", "grpc"), ("grpc", "auto")])
def test_newcomer_whose_links_are_grpc_and_not_those_of_the_members_is_refused(here: str, newcomer: str) -> None:
    text = reason(running(here, here).register(claim("new", newcomer), 1.0))
    assert f"uses transport '{newcomer}', and " in text
    assert f"uses '{here}': either all members of a job use 'grpc' or none does" in text


def test_newcomer_with_grpc_links_like_those_of_the_members_waits() -> None:
    assert isinstance(running("grpc", "grpc").register(claim("new", "grpc"), 1.0), Waiting)


@pytest.mark.parametrize(("here", "newcomer", "host"), [("auto", "shm", "machine"), ("auto", "tcp", "other")])
def test_newcomer_that_fits_waits(here: str, newcomer: str, host: str) -> None:
    assert waits(running(here, here).register(claim("new", newcomer, host=host), 1.0))


def test_newcomer_that_cannot_share_memory_with_silent_members_is_refused() -> None:
    state = running("auto", "auto")
    now = pass_time(state, 0.0, 12.0)
    assert state.news().size == 0, "their leases have expired, and they may return"
    assert "requires transport 'shm'" in reason(state.register(claim("new", "shm", host="other"), now))


def test_newcomer_is_not_refused_because_of_a_dead_member_that_required_shared_memory() -> None:
    state = running("shm", "auto")
    state.gone("a", 1.0)
    assert waits(state.register(claim("new", host="other"), 1.0))


def test_claim_without_proof_of_membership_is_checked_like_a_newcomer() -> None:
    state = running("auto", "auto")
    made_up = replace(claim("new", "", address=""), generation=1, run=RUN)
    assert "has no data address" in reason(state.register(made_up, 1.0))


def test_claim_without_proof_of_membership_does_not_hold_the_state() -> None:
    state = running("auto", "auto")
    made_up, now = replace(claim("new"), generation=1, run=RUN), pass_time(state, 0.0, 12.0)
    assert state.news().size == 0, "the members are silent"
    state.register(made_up, now)
    assert waits(state.register(made_up, pass_time(state, now, now + 2))), "it waits for the silent members"


def test_id_of_a_dropped_member_that_may_return_is_known() -> None:
    state = running("auto", "auto", "auto")
    for name in "ab":
        state.register(replace(claim(name), generation=1, run=RUN, session=b"again", lost=("c",)), 1.0)
    pass_time(state, 1.0, 3.0)
    assert [member.id for member in state.members] == ["a", "b"]
    assert state.knows("c")
    assert not state.knows("somebody")


def test_unknown_transport_is_refused() -> None:
    assert "there is no transport 'carrier pigeon'" in reason(elastic().register(claim("new", "carrier pigeon"), 0.0))


# -- runs


def test_member_of_another_run_is_refused() -> None:
    state = running("auto", "auto")
    stale = replace(worker("old", generation=1), run=OTHER_RUN)
    refused = reason(state.register(stale, 1.0))
    assert f"is a member of run {OTHER_RUN.hex()}" in refused
    assert RUN.hex() in refused
    assert state.heartbeat("ab", 1.0).joiners == 0


def test_heartbeats_and_deaths_of_another_run_do_not_count() -> None:
    state = running("auto", "auto")
    news = state.heartbeat("ab", 1.0, run=OTHER_RUN)
    assert (news.unknown, news.run) == (("a", "b"), RUN)
    state.gone(["a"], 1.0, run=OTHER_RUN)
    assert state.heartbeat("ab", 1.0, run=RUN).size == 2
    for now in range(1, 12):
        state.heartbeat("a", float(now), run=OTHER_RUN)
        state.heartbeat("b", float(now), run=RUN)
    assert state.news().evicted == ("a",), "heartbeats of another run renew no lease"


def test_heartbeat_for_an_unregistered_id_is_ignored_and_reported() -> None:
    state = running("auto", "auto")
    news = state.heartbeat(["a", "b", "starting"], 1.0)
    assert (news.unknown, news.size) == (("starting",), 2)


def test_leave_in_another_run_is_ignored() -> None:
    state = running("auto", "auto")
    assert not state.leave(state.members[0], 1.0, finished=True, run=OTHER_RUN)
    assert not state.news().finished
    assert state.leave(state.members[0], 1.0, run=RUN)


# -- members that may report that all work is done


def test_finished_from_a_waiting_process_is_ignored() -> None:
    state = running("auto", "auto")
    waiting = claim("new")
    state.register(waiting, 1.0)
    assert state.leave(waiting.member, 1.0, finished=True)
    assert not state.news().finished
    assert state.leave(state.members[0], 1.0, finished=True)
    assert state.news().finished


def test_finished_from_a_removed_member_is_ignored() -> None:
    state = running("auto", "auto")
    gone = state.members[0]
    state.gone(["a"], 1.0)
    assert not state.leave(gone, 1.0, finished=True)
    assert not state.news().finished


# -- reused pids


def test_process_with_a_reused_pid_is_another_process() -> None:
    state = running("auto", "auto")
    first = state.members[0]
    again = Member(first.id, 0, first.host, first.hostname, first.pid, first.address, started=first.started + 1)
    assert not state.leave(again, 1.0)
    assert isinstance(state.register(worker("a"), 1.0), Assembly)


# -- replacement runs


def test_generation_without_the_last_state_begins_a_new_run_and_refuses_the_old_members() -> None:
    """All members are silent for longer than the limit, and a newcomer begins without them."""
    state = running("auto", "auto")
    newcomer, now = claim("new"), 1.0
    while isinstance(outcome := state.register(newcomer, now), Waiting):
        now += 1.0
        assert now < 200, "the newcomer waits for ever"
    assert isinstance(outcome, Assembly)
    assert (outcome.run > RUN, outcome.previous_run, outcome.generation) == (True, RUN, 2)
    assert "is a member of run" in reason(state.register(replace(claim("a"), generation=1, run=RUN), now + 1))
    assert state.heartbeat("a", now, run=RUN).unknown == ("a",)


def test_generation_of_a_member_with_an_earlier_state_begins_a_new_run_that_it_accepts() -> None:
    state = running("auto", "auto", "auto")
    for name in "ab":
        state.register(replace(claim(name), generation=1, run=RUN, session=b"again", lost=("c",)), 1.0)
    pass_time(state, 1.0, 3.0)
    assert [member.id for member in state.members] == ["a", "b"]
    state.gone("ab", 3.0)
    dropped = replace(claim("c"), generation=1, run=RUN, session=b"again")
    outcome = state.register(dropped, 3.0)
    outcome = state.register(dropped, pass_time(state, 3.0, 9.0))
    assert order(outcome) == ["c"]
    assert isinstance(outcome, Assembly)
    assert (outcome.previous_run, outcome.run > RUN) == (RUN, True), "a and b may have committed more"
    restored = Membership.restore(json.loads(json.dumps(state.snapshot())), 9.0)
    assert restored.register(dropped, 9.0) == outcome


def test_generation_of_survivors_stays_in_its_run() -> None:
    state = running("auto", "auto")
    state.gone("b", 1.0)
    outcome = state.register(replace(claim("a"), generation=1, run=RUN, session=b"again"), 1.0)
    assert isinstance(outcome, Assembly)
    assert (outcome.run, outcome.previous_run) == (RUN, b"")


def test_first_member_of_a_new_run_that_asks_late_gets_the_previous_run_id() -> None:
    """Two members without the state begin a new run. One returns from it before the other has received its Assembly."""
    state = running("auto", "auto")
    claims = [replace(claim(name), generation=1, run=RUN, session=b"again", lacks_state=True) for name in "ab"]
    for one in claims:
        state.register(one, 1.0)
    assert (state.generation, state.terms.run > RUN) == (2, True)
    back = replace(claim("a"), generation=2, run=state.terms.run, session=b"again")
    state.register(back, 2.0)
    outcome = state.register(claims[1], 2.0)
    assert isinstance(outcome, Assembly)
    assert (outcome.generation, outcome.run, outcome.previous_run) == (3, state.terms.run, RUN)
