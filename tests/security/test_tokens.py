"""Tests of join tokens: what they allow, and the errors for expired, changed and foreign ones."""

from __future__ import annotations

import secrets
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError
from gradwire.security import tokens
from gradwire.security.tokens import Ticket, Token, TokenGate, key_of, make, read, wrapped

SECRET = secrets.token_bytes(32)
NOW = 1_800_000_000.0


def token(**options: object) -> Token:
    return read(make(SECRET, **{"job": "digits", "expires_in": 60.0, "now": NOW, **options}))  # type: ignore[arg-type]


def test_token_key_is_the_same_on_both_sides() -> None:
    text = make(SECRET, job="digits", expires_in=60)
    assert tokens.is_token(text)
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text
    held = read(f"{text}\n")
    assert held.job == "digits"
    assert held.key == key_of(SECRET, held.ticket)
    assert held.key.hex() not in repr(held)
    assert SECRET not in held.ticket
    assert make(SECRET, job="digits", expires_in=60) != text


def test_ticket_with_any_change_is_refused() -> None:
    held = token()
    said = Ticket.parse(held.ticket)
    forged = Ticket(said.job, said.expires + 1, said.uses, said.number).pack()
    assert key_of(SECRET, forged) != held.key
    assert key_of(secrets.token_bytes(32), held.ticket) != held.key


def register(gate: TokenGate, ticket: bytes, member: str, now: float, known: Collection[str] = ()) -> str | None:
    """Return why a member may not register with a ticket. If it may, record it and return None."""
    reason = gate.refusal(ticket, member, now, known.__contains__)
    if reason is None:
        gate.admit(ticket, member)
    return reason


def test_gate_admits_as_many_members_as_the_token_allows_and_keeps_them() -> None:
    gate, held = TokenGate("digits"), token(uses=2)
    assert register(gate, held.ticket, "a", NOW) is None
    assert register(gate, held.ticket, "a", NOW + 1) is None
    assert register(gate, held.ticket, "b", NOW + 59) is None
    assert register(gate, held.ticket, "c", NOW + 59) == ("its join token has no uses left (2 of 2 used)")
    assert register(gate, held.ticket, "a", NOW + 10_000) is None
    assert register(gate, token().ticket, "c", NOW) is None


def test_gate_expired_token_is_refused() -> None:
    gate, held = TokenGate("digits"), token()
    assert register(gate, held.ticket, "late", NOW + 75) == "its join token expired 15 s ago"
    assert register(gate, held.ticket, "late", NOW + 60) == "its join token expired 0 s ago"
    assert register(gate, held.ticket, "punctual", NOW + 59.9) is None


def test_gate_token_without_a_number_of_uses_admits_any_number_until_it_expires() -> None:
    gate, held = TokenGate("digits"), token(uses=0)
    assert all(register(gate, held.ticket, f"worker {n}", NOW) is None for n in range(1000))
    assert register(gate, held.ticket, "late", NOW + 60) is not None


def test_gate_token_of_another_job_or_malformed_is_refused() -> None:
    gate = TokenGate("digits")
    assert register(gate, token(job="letters").ticket, "a", NOW) == (
        "its join token is for job letters, and this is job digits"
    )
    for nonsense in (b"", b"x", bytes(24), bytes(24) + b"\xff", bytes(1000)):
        assert str(register(gate, nonsense, "a", NOW)).startswith("its join token is damaged")


def test_gate_restored_from_a_snapshot_remembers_its_members() -> None:
    gate, held = TokenGate("digits"), token()
    register(gate, held.ticket, "a", NOW)
    again = TokenGate("digits")
    again.restore(gate.snapshot())
    assert register(again, held.ticket, "a", NOW + 1000) is None
    assert register(again, held.ticket, "b", NOW) is not None


def test_gate_id_registered_with_other_credentials_is_refused_and_not_spoken_for() -> None:
    gate, held, other = TokenGate("digits"), token(uses=4), token(uses=4)
    assert register(gate, held.ticket, "secret holder", NOW, {"secret holder"}) == (
        "the id 'secret holder' is registered with other credentials than this join token"
    )
    assert not gate.may_act_for(held.ticket, "secret holder")
    assert register(gate, held.ticket, "guest", NOW) is None
    assert register(gate, other.ticket, "guest", NOW, {"guest"}) is not None
    assert gate.may_act_for(held.ticket, "guest")
    assert not gate.may_act_for(other.ticket, "guest")


def test_gate_reused_id_belongs_to_its_current_holder_only() -> None:
    gate, held, other = TokenGate("digits"), token(), token()
    register(gate, held.ticket, "guest", NOW)
    register(gate, other.ticket, "guest", NOW)  # the first one has left
    assert (gate.may_act_for(held.ticket, "guest"), gate.may_act_for(other.ticket, "guest")) == (False, True)
    assert "(1 of 1 used)" in str(register(gate, held.ticket, "another", NOW))
    gate.admit(b"", "guest")  # with the secret
    assert not gate.may_act_for(other.ticket, "guest")


def test_gate_refusal_counts_no_use() -> None:
    gate, held = TokenGate("digits"), token()
    for name in ("a", "b", "c"):
        assert gate.refusal(held.ticket, name, NOW, lambda _: False) is None


def test_gate_member_that_leaves_before_any_generation_returns_its_use() -> None:
    gate, held = TokenGate("digits"), token()
    register(gate, held.ticket, "a", NOW)
    assert gate.release("a")
    assert register(gate, held.ticket, "b", NOW) is None
    gate.registered(["b"])
    assert not gate.release("b")
    assert register(gate, held.ticket, "c", NOW) is not None


@pytest.mark.parametrize(
    "text",
    ["", "gwj1.", "gwj1.x.y", "gwj1.a", "gwj1.é.é", "secret secret secret", make(SECRET, job="j", expires_in=9)[:-5]],
    ids=range(7),
)
def test_damaged_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the join token is damaged"):
        read(text)


@given(st.text() | st.text().map(lambda tail: f"gwj1.{tail}") | st.binary().map(lambda b: f"gwj1.{b.hex()}.{b.hex()}"))
def test_read_any_text_raises_only_config_errors(text: str) -> None:
    try:
        read(text)
    except ConfigError:
        return
    assert tokens.is_token(text)


@given(st.binary(max_size=400))
def test_gate_any_ticket_is_admitted_or_refused_without_an_error(ticket: bytes) -> None:
    register(TokenGate("digits"), ticket, "a", NOW)


@pytest.mark.parametrize(
    "wrong",
    [{"job": ""}, {"job": "x" * 201}, {"expires_in": 0}, {"expires_in": float("nan")}, {"uses": -1}, {"uses": 1 << 17}],
)
def test_make_with_invalid_arguments_raises(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        token(**wrong)


def test_wrapped_key_is_recovered_only_with_the_same_inputs() -> None:
    key, over = secrets.token_bytes(32), secrets.token_bytes(32)
    hidden = wrapped(key, over, b"nonce", b"1")
    assert hidden != key
    assert wrapped(hidden, over, b"nonce", b"1") == key
    assert wrapped(hidden, over, b"nonce", b"2") != key
    with pytest.raises(ValueError, match="a wrapped key has 32 bytes, not 3"):
        wrapped(b"key", over)
