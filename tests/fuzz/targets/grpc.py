"""Fuzzes the gRPC transport: bytes to a rank's HTTP/2 server, and bytes of a server to the rank that connected."""

from __future__ import annotations

from hypothesis import strategies as st

from fuzz.target import MIB, Target
from gradwire.transports.grpc.session import MESSAGE_BYTES, STREAM_WINDOW, Session, SessionError

FRAME_TYPES = st.sampled_from((*range(10), 10, 12, 255))


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


@st.composite
def frames_after(draw: st.DrawFn, begin: bytes) -> bytes:
    """Draw frames with valid lengths and any contents, after a valid beginning."""
    bodies = st.one_of(st.binary(max_size=60), st.sampled_from((b"", bytes(4), bytes(8), b"\0\0\0\0\1x", b"\xff" * 8)))
    parts = [
        frame(draw(FRAME_TYPES), draw(st.integers(0, 255)), draw(st.sampled_from((0, 1, 2, 3, 1 << 31))), draw(bodies))
        for _ in range(draw(st.integers(1, 6)))
    ]
    return begin + b"".join(parts)


def check(session: Session) -> None:
    assert len(session.output()) < MIB
    for state in list(session.streams.values()):
        assert len(state.arrived) <= STREAM_WINDOW
        assert 0 <= session.room(state) <= MESSAGE_BYTES
        session.consumed(state, len(state.arrived))
        if room := session.room(state):
            session.send(state, bytes(min(room, 100)))
        session.end(state)
    assert all(state.sent_end for state in session.streams.values())


def accepts(session: Session, data: bytes) -> bool:
    try:
        session.receive(data)
        check(session)
    except SessionError as error:
        reason = str(error)
    else:
        return True
    assert reason.isprintable()
    return False


def to_server(data: bytes) -> bool:
    return accepts(Session(client=False), data)


def to_client(data: bytes) -> bool:
    session = Session(client=True)
    state = session.open("host:1", "http")
    accepted = accepts(session, data)
    assert state.reason is None or state.reason.isprintable()
    return accepted


def _beginnings() -> tuple[bytes, bytes]:
    """Return what a client and a server send at the beginning of a link, with a message in each direction."""
    client, server = Session(client=True), Session(client=False)
    mine = client.open("host:1", "http")
    client.send(mine, b"a hello")
    sent = client.output()
    (theirs,) = server.receive(sent)
    server.send(theirs, b"a challenge")
    return sent, server.output()


CLIENT, SERVER = _beginnings()
TARGETS = (
    Target("gRPC server", to_server, (CLIENT,), frames_after(CLIENT), 2 * MIB),
    Target("gRPC client", to_client, (SERVER,), frames_after(SERVER), 2 * MIB),
)
