"""Tests of link admission: which links are admitted, and the errors on each side."""

from __future__ import annotations

import contextlib
import secrets

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradwire.errors import ConfigError, NoConnection, Refused
from gradwire.security.admission import LONGEST_REASON, NO_SECRET, Acceptor, Dialer, Hello

KEY = b"k" * 32
OTHER_KEY = b"o" * 32
HELLO = Hello(job=b"j" * 16, generation=1, channel=7, source=2, target=0)

hellos = st.builds(
    Hello,
    job=st.binary(min_size=16, max_size=16),
    generation=st.integers(0, 2**64 - 1),
    channel=st.integers(0, 2**64 - 1),
    source=st.integers(0, 2**32 - 1),
    target=st.integers(0, 2**32 - 1),
)


def welcome(hello: Hello) -> str | None:
    return None


def deliver(side: Dialer | Acceptor, data: bytes, piece: int = 1000) -> bytes:
    """Feed `data` in pieces of at most `piece` bytes, never more than is wanted, and return the replies."""
    answer = b""
    while data and side.wanted:
        count = min(piece, side.wanted, len(data))
        answer += side.feed(data[:count])
        data = data[count:]
    return answer


def meet(dialer: Dialer, acceptor: Acceptor, piece: int = 1000) -> list[bytes]:
    """Run the whole handshake and return the frames in the order in which they were sent."""
    frames = [dialer.start()]
    sides: tuple[Dialer | Acceptor, ...] = (acceptor, dialer)
    while frames[-1]:
        frames.append(deliver(sides[(len(frames) - 1) % 2], frames[-1], piece))
    return frames[:-1]


@given(hello=hellos, piece=st.integers(1, 100))
def test_admission_with_the_same_secret_succeeds_in_any_pieces(hello: Hello, piece: int) -> None:
    dialer, acceptor = Dialer(KEY, hello), Acceptor(KEY, welcome)
    frames = meet(dialer, acceptor, piece)
    assert dialer.done
    assert acceptor.done
    assert acceptor.refusal is None
    assert acceptor.hello == hello
    assert dialer.wanted == acceptor.wanted == 0
    assert len(frames) == 4
    assert max(map(len, frames)) <= 128


@given(piece=st.integers(1, 300))
def test_admission_with_a_wrong_secret_fails_on_both_sides(piece: int) -> None:
    acceptor = Acceptor(KEY, welcome)
    with pytest.raises(Refused, match=f"{NO_SECRET}.*not authenticated"):
        meet(Dialer(OTHER_KEY, HELLO), acceptor, piece)
    assert acceptor.refusal == f"the process that claims to be rank 2 {NO_SECRET}"
    assert not acceptor.done
    assert acceptor.wanted == 0


def test_dialer_refuses_an_acceptor_that_cannot_prove_the_secret() -> None:
    dialer = Dialer(KEY, HELLO)
    challenge = Acceptor(OTHER_KEY, welcome).feed(dialer.start())
    deliver(dialer, challenge)
    admitted = challenge[:8] + b"\x02\x20" + secrets.token_bytes(32)
    with pytest.raises(Refused, match=NO_SECRET) as caught:
        deliver(dialer, admitted)
    assert not dialer.done
    assert (caught.value.rank, caught.value.peer, caught.value.generation) == (2, 0, 1)


@given(reason=st.text(max_size=300), piece=st.integers(1, 300))
def test_check_reason_reaches_the_dialer_bounded_and_authenticated(reason: str, piece: int) -> None:
    acceptor = Acceptor(KEY, lambda hello: reason)
    with pytest.raises(Refused) as caught:
        meet(Dialer(KEY, HELLO), acceptor, piece)
    assert acceptor.refusal == reason
    assert not acceptor.done
    assert "not authenticated" not in caught.value.message.removesuffix(reason)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < LONGEST_REASON + 100
    if reason.isascii() and reason.isprintable() and len(reason) <= LONGEST_REASON:
        assert caught.value.message == f"rank 0 refused the link: {reason}"


def test_forged_refusal_is_marked_as_not_authenticated() -> None:
    dialer = Dialer(KEY, HELLO)
    deliver(dialer, Acceptor(KEY, welcome).feed(dialer.start()))
    forged = b"the job is over\r\n\x1b[2J"
    with pytest.raises(Refused, match=r"the job is over.*\(reply not authenticated\)") as caught:
        deliver(dialer, b"gw-reply\x03" + bytes([32 + len(forged)]) + bytes(32) + forged)
    assert caught.value.message.isprintable()


def test_check_is_called_only_for_proven_dialers() -> None:
    asked: list[Hello] = []
    with pytest.raises(Refused):
        meet(Dialer(OTHER_KEY, HELLO), Acceptor(KEY, asked.append))
    assert asked == []
    meet(Dialer(KEY, HELLO), Acceptor(KEY, asked.append))
    assert asked == [HELLO]


def test_a_recorded_admission_cannot_be_replayed() -> None:
    hello, _, proof, _ = meet(Dialer(KEY, HELLO), Acceptor(KEY, welcome))
    acceptor = Acceptor(KEY, welcome)
    acceptor.feed(hello)
    acceptor.feed(proof)
    assert not acceptor.done
    assert NO_SECRET in (acceptor.refusal or "")


def test_recorded_replies_are_refused_by_a_new_dialer() -> None:
    _, challenge, _, admitted = meet(Dialer(KEY, HELLO), Acceptor(KEY, welcome))
    dialer = Dialer(KEY, HELLO)
    dialer.start()
    deliver(dialer, challenge)
    with pytest.raises(Refused, match=NO_SECRET):
        deliver(dialer, admitted)


def test_proof_sent_back_to_the_dialer_is_refused() -> None:
    """An impostor that sends the dialer's own proof back as the acceptor's proof is refused."""
    dialer = Dialer(KEY, HELLO)
    proof = deliver(dialer, Acceptor(KEY, welcome).feed(dialer.start()))
    with pytest.raises(Refused, match=NO_SECRET):
        deliver(dialer, b"gw-reply\x02\x20" + proof)


@given(position=st.integers(0, 79), bit=st.integers(0, 7))
def test_hello_with_any_bit_changed_is_refused(position: int, bit: int) -> None:
    """An attacker between the two who changes any bit (another rank, channel, job …) breaks the admission."""
    dialer, acceptor = Dialer(KEY, HELLO), Acceptor(KEY, welcome)
    hello = bytearray(dialer.start())
    hello[position] ^= 1 << bit
    answer = deliver(acceptor, bytes(hello), 1000)
    if acceptor.refusal is None:
        acceptor.feed(deliver(dialer, answer))
    assert acceptor.refusal is not None
    assert not acceptor.done


@given(noise=st.binary(max_size=400), piece=st.integers(1, 400))
def test_acceptor_random_bytes_are_never_admitted_and_stay_bounded(noise: bytes, piece: int) -> None:
    acceptor = Acceptor(KEY, welcome)
    answer = deliver(acceptor, noise, piece)
    assert not acceptor.done
    assert len(answer) < 300
    assert 0 <= acceptor.wanted <= 80, "it buffers at most one hello"
    acceptor.eof()
    assert acceptor.refusal


@given(noise=st.binary(min_size=8, max_size=400), piece=st.integers(1, 400), challenged=st.booleans())
def test_dialer_random_replies_are_refused(noise: bytes, piece: int, challenged: bool) -> None:
    assume(not noise.startswith(b"gw-reply"))
    dialer = Dialer(KEY, HELLO)
    first = Acceptor(KEY, welcome).feed(dialer.start())
    if challenged:
        deliver(dialer, first)
    with pytest.raises(Refused):
        deliver(dialer, noise, piece)


@given(tail=st.binary(max_size=300))
def test_dialer_random_frames_behind_the_right_magic_do_not_admit(tail: bytes) -> None:
    dialer = Dialer(KEY, HELLO)
    deliver(dialer, Acceptor(KEY, welcome).feed(dialer.start()))
    with contextlib.suppress(Refused):
        deliver(dialer, b"gw-reply" + tail, 1000)
    assert not dialer.done


def test_acceptor_wrong_magic_is_refused_at_the_first_wrong_byte() -> None:
    acceptor = Acceptor(KEY, welcome)
    assert b"not a gradwire admission" in acceptor.feed(b"G")
    assert acceptor.refusal == "the received bytes are not a gradwire admission"


@given(cut=st.integers(0, 79))
def test_acceptor_truncated_hello_is_refused(cut: int) -> None:
    acceptor = Acceptor(KEY, welcome)
    assert acceptor.feed(Dialer(KEY, HELLO).start()[:cut]) == b""
    acceptor.eof()
    assert acceptor.refusal == f"the connection closed {80 - cut} bytes before the end of a hello"


def test_acceptor_truncated_proof_is_refused() -> None:
    dialer, acceptor = Dialer(KEY, HELLO), Acceptor(KEY, welcome)
    acceptor.feed(deliver(dialer, acceptor.feed(dialer.start()))[:31])
    acceptor.eof()
    assert (
        acceptor.refusal
        == "the connection closed 1 bytes before the end of the proof of a process that claims to be rank 2"
    )


def test_acceptor_end_of_an_admitted_connection_changes_nothing() -> None:
    acceptor = Acceptor(KEY, welcome)
    meet(Dialer(KEY, HELLO), acceptor)
    acceptor.eof()
    assert acceptor.done
    assert acceptor.refusal is None


def test_dialer_eof_names_the_peer() -> None:
    error = Dialer(KEY, HELLO).eof()
    assert type(error) is NoConnection
    assert "rank 0 closed the connection during admission" in error.message


def test_feed_with_more_bytes_than_wanted_raises_value_error() -> None:
    with pytest.raises(ValueError, match="fed 81 bytes, and it wanted at most 80"):
        Acceptor(KEY, welcome).feed(bytes(81))
    dialer = Dialer(KEY, HELLO)
    meet(dialer, Acceptor(KEY, welcome))
    with pytest.raises(ValueError, match="wanted at most 0"):
        dialer.feed(b"payload")


@pytest.mark.parametrize(
    "wrong", [{"job": b"short"}, {"generation": -1}, {"channel": 2**64}, {"source": 2**32}, {"target": -1}]
)
def test_hello_field_out_of_range_raises_config_error(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"job": b"j" * 16, "generation": 0, "channel": 0, "source": 0, "target": 1}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Hello(**{**fields, **wrong})  # type: ignore[arg-type]


def test_short_link_key_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        Dialer(b"short", HELLO)
