"""One HTTP/2 connection with its gRPC streams. It is pure: bytes in, bytes out, no socket and no clock.

A link is one call of `PATH`, a method with a stream of messages in each direction. The messages of a direction are
consecutive pieces of the link's bytes; their boundaries carry no meaning. A message is smaller than the limits of gRPC
servers and proxies (4 MiB by default), and an empty message only shows a proxy that the stream is in use.

HTTP/2 limits what a peer may send. A stream's window grows again only when the link's reader has consumed the bytes, so
a slow reader stops its own stream. The window of the connection grows at once, so it does not stop other streams.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from gradwire.security.admission import printable

PATH = "/gradwire.transport.v1.Links/Open"
MESSAGE_BYTES = 256 << 10  # the largest message
STREAM_WINDOW = 512 << 10  # bytes that a peer may send on a stream before this side has consumed them
CONNECTION_WINDOW = 4 << 20
FRAME_BYTES = 64 << 10
MAX_STREAMS = 1000  # on one connection: a proxy may carry the links of many ranks over one
LONGEST_HEADERS = 16 << 10
LONGEST_REASON = 200  # characters

_PREFIX = struct.Struct(">BI")  # of a message: whether it is compressed, and its length
_FRAME_HEADER, _GOAWAY = 9, 7  # HTTP/2: bytes of a frame header, a frame type
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of a client
_OK, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED = "0", "8", "12"  # values of grpc-status
_GRPC = "application/grpc"
_EMPTY_MESSAGE = _PREFIX.pack(0, 0)


class SessionError(Exception):
    """The peer violated HTTP/2 or gRPC, or it ended the connection. The connection cannot be used any more.

    `final` means that another attempt would end in the same way.
    """

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class StreamState:
    """One gRPC stream: what has arrived on it, and which sides have ended it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = bytearray()  # bytes of the link that are not consumed yet
        self.received_end = False
        self.sent_end = False
        self.reason: str | None = None  # why the peer or a proxy ended it, if that is known
        self._messages = _MessageReader()
        self._credit = 0  # consumed bytes that the peer does not know of yet

    def add(self, data: bytes, flow_controlled: int) -> None:
        """Add the data of a frame that counts as `flow_controlled` bytes. Raise `SessionError` if it is invalid."""
        payload = 0
        for part in self._messages.payload(data):
            self.arrived += part
            payload += len(part)
        self._credit += flow_controlled - payload

    def take_credit(self, consumed: int) -> int:
        """Count consumed bytes. Return the bytes by which the window should grow now; 0 if a later time is enough."""
        self._credit += consumed
        if self._credit < STREAM_WINDOW // 4:
            return 0
        credit, self._credit = self._credit, 0
        return credit


class Session:
    """An HTTP/2 connection, at its client's or at its server's end."""

    def __init__(self, *, client: bool) -> None:
        self.streams: dict[int, StreamState] = {}
        self._client = client
        self._received = bytearray()
        self._credit = 0
        self._preface = not client  # it has not arrived yet
        self._h2 = H2Connection(H2Configuration(client_side=client, header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: LONGEST_HEADERS,
                **({SettingCodes.ENABLE_PUSH: 0} if client else {SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS}),
            }
        )
        self._h2.increment_flow_control_window(CONNECTION_WINDOW)

    def output(self) -> bytes:
        """Return the bytes to send to the peer since the last call."""
        return self._h2.data_to_send()

    # -- streams ------------------------------------------------------------------------------------------------------

    def open(self, authority: str, scheme: str) -> StreamState:
        """Open a stream, as the client."""
        state = StreamState(self._h2.get_next_available_stream_id())
        headers = [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", PATH),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", _GRPC),
        ]
        self._h2.send_headers(state.number, headers)
        self.streams[state.number] = state
        return state

    def room(self, state: StreamState) -> int:
        """Return how many bytes of the link may be sent on a stream now, as one message."""
        if state.sent_end:
            return 0
        try:
            window = self._h2.local_flow_control_window(state.number)
        except H2Error:
            return 0
        return max(0, min(window - _PREFIX.size, MESSAGE_BYTES))

    def send(self, state: StreamState, data: bytes) -> None:
        """Send bytes of the link, at most `room(state)`."""
        self._write(state, _PREFIX.pack(0, len(data)) + data)

    def show_use(self, state: StreamState) -> None:
        """Send an empty message, so that proxies do not end a stream that carries no data at the moment."""
        if self.room(state):
            self._write(state, _EMPTY_MESSAGE)

    def _write(self, state: StreamState, message: bytes) -> None:
        view, most = memoryview(message), self._h2.max_outbound_frame_size
        with _valid_http2():
            for start in range(0, len(view), most):
                self._h2.send_data(state.number, bytes(view[start : start + most]))

    def end(self, state: StreamState) -> None:
        """End this side of a stream, after what was sent on it."""
        if state.sent_end:
            return
        state.sent_end = True
        if not self._client:
            self._answer(state, _OK)
            return
        with _valid_http2():
            self._h2.end_stream(state.number)
        self._forget_ended(state)

    def refuse_stream(self, state: StreamState) -> None:
        """End a stream that the peer has opened, because this process has no room for it."""
        self._answer(state, _RESOURCE_EXHAUSTED)

    def _answer(self, state: StreamState, status: str) -> None:
        """End a stream as the server, which ends the client's side too."""
        with _valid_http2():
            self._h2.send_headers(state.number, [("grpc-status", status)], end_stream=True)
        if not state.received_end:
            self._stop_request(state.number)
        state.sent_end = state.received_end = True
        self._forget_ended(state)

    def _stop_request(self, number: int) -> None:
        """Tell a client that this server needs no more of its request. The answer stays valid."""
        with contextlib.suppress(H2Error):  # the client has ended or reset it
            self._h2.reset_stream(number, ErrorCodes.NO_ERROR)

    def consumed(self, state: StreamState, count: int) -> None:
        """Allow the peer to send more on a stream, because its reader has consumed some bytes."""
        credit = state.take_credit(count)
        if credit and not state.received_end:
            with _valid_http2():
                self._h2.increment_flow_control_window(credit, state.number)

    def _forget_ended(self, state: StreamState) -> None:
        if state.sent_end and state.received_end:
            self.streams.pop(state.number, None)

    def refuse(self, reason: str) -> None:
        """End the connection for a reason that the peer should read, because all its attempts would be refused."""
        self._h2.close_connection(ErrorCodes.INADEQUATE_SECURITY, reason.encode())

    def close(self) -> None:
        """End the connection."""
        with _valid_http2():
            self._h2.close_connection()

    # -- received bytes -----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[StreamState]:
        """Process bytes from the peer, and return the streams that it has opened.

        Raise `SessionError` if they are invalid, or if the peer has ended the connection.
        """
        self._received += data
        opened: list[StreamState] = []
        with _valid_http2():
            for frame in self._frames():
                for event in self._h2.receive_data(frame):
                    state = self._handle(event)
                    if state is not None:
                        opened.append(state)
        return opened

    def _frames(self) -> Iterator[bytes]:
        """Cut the received bytes into frames.

        GOAWAY is handled here. A proxy sends it before it restarts, and the open streams continue. The library h2 would
        end them.
        """
        if self._preface:
            if not _PREFACE.startswith(self._received[: len(_PREFACE)]):
                note = " but TLS: this rank was given no certificates" if self._received.startswith(b"\x16\x03") else ""
                raise SessionError(f"the received bytes are not HTTP/2{note}")
            if len(self._received) < len(_PREFACE):
                return
            self._preface = False
            yield self._cut(len(_PREFACE))
        while len(self._received) >= _FRAME_HEADER:
            length = int.from_bytes(self._received[:3], "big")
            if length > FRAME_BYTES:
                raise SessionError(f"it sent a frame of {length} bytes, and at most {FRAME_BYTES} are allowed")
            if len(self._received) < _FRAME_HEADER + length:
                return
            frame = self._cut(_FRAME_HEADER + length)
            if frame[3] == _GOAWAY:
                self._peer_is_closing(frame[_FRAME_HEADER:])
            else:
                yield frame

    def _cut(self, count: int) -> bytes:
        part = bytes(self._received[:count])
        del self._received[:count]
        return part

    def _peer_is_closing(self, body: bytes) -> None:
        last, code = int.from_bytes(body[:4], "big") & 0x7FFF_FFFF, int.from_bytes(body[4:8], "big")
        mine = max(self.streams, default=0) if self._client else 0
        if code != ErrorCodes.NO_ERROR or mine > last:
            text = printable(body[8:].decode("utf-8", "replace"))[:LONGEST_REASON]
            final = code == ErrorCodes.INADEQUATE_SECURITY
            what = "it refused the connection" if final else f"it ended the HTTP/2 connection (error {code})"
            raise SessionError(f"{what}: {text or 'no reason given'} (reply not authenticated)", final=final)

    def _handle(self, event: Event) -> StreamState | None:
        if isinstance(event, RequestReceived):
            return self._accept(event)
        if isinstance(event, DataReceived):
            self._data(event)
            return None
        state = self.streams.get(getattr(event, "stream_id", None) or 0)
        if state is None:
            return None
        if isinstance(event, ResponseReceived | TrailersReceived):
            state.reason = _refusal(event) or state.reason
        elif isinstance(event, StreamReset):
            if not state.received_end:
                state.reason = state.reason or f"the stream was reset (HTTP/2 error {event.error_code or 0:d})"
            state.received_end = state.sent_end = True
        elif isinstance(event, StreamEnded):
            state.received_end = True
        self._forget_ended(state)
        return None

    def _accept(self, event: RequestReceived) -> StreamState | None:
        headers = {str(name): str(value) for name, value in event.headers or ()}
        number = event.stream_id or 0
        if headers.get(":path") != PATH or not headers.get("content-type", "").startswith(_GRPC):
            status = [(":status", "200"), ("content-type", _GRPC), ("grpc-status", _UNIMPLEMENTED)]
            self._h2.send_headers(number, status, end_stream=True)
            self._stop_request(number)
            return None
        state = self.streams[number] = StreamState(number)
        # Sent at once: a proxy may wait for the headers of an answer before it forwards anything.
        self._h2.send_headers(number, [(":status", "200"), ("content-type", _GRPC)])
        return state

    def _data(self, event: DataReceived) -> None:
        size = event.flow_controlled_length or 0
        state = self.streams.get(event.stream_id or 0)
        if state is not None and not state.received_end:
            state.add(event.data or b"", size)
        self._credit += size
        if self._credit >= CONNECTION_WINDOW // 4:
            self._h2.increment_flow_control_window(self._credit)
            self._credit = 0


class _MessageReader:
    """Removes the prefixes of messages from the data of a stream."""

    def __init__(self) -> None:
        self._prefix = bytearray()
        self._left = 0  # bytes of the current message that have not arrived yet

    def payload(self, data: bytes) -> Iterator[memoryview]:
        """Yield the parts of messages in the data. Raise `SessionError` if a message is too large or compressed."""
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _PREFIX.size - len(self._prefix)
                self._prefix += view[:missing]
                view = view[missing:]
                if len(self._prefix) == _PREFIX.size:
                    self._begin_message()
            if part := view[: self._left]:
                yield part
                self._left -= len(part)
                view = view[len(part) :]

    def _begin_message(self) -> None:
        compressed, self._left = _PREFIX.unpack(self._prefix)
        self._prefix.clear()
        if compressed:
            raise SessionError("it sent a compressed message, and links are not compressed")
        if self._left > MESSAGE_BYTES:
            raise SessionError(f"it sent a message of {self._left} bytes, and at most {MESSAGE_BYTES} are allowed")


@contextlib.contextmanager
def _valid_http2() -> Iterator[None]:
    """Raise errors of HTTP/2 as `SessionError`. Sending can fail too, because of frames received before."""
    try:
        yield
    except (H2Error, ValueError, KeyError, IndexError) as error:
        raise SessionError(f"it does not use valid HTTP/2 ({type(error).__name__})") from error


def _refusal(event: ResponseReceived | TrailersReceived) -> str | None:
    """Return the reason in the headers of an answer, or None if they report no failure."""
    headers = {str(name): str(value) for name, value in event.headers or ()}
    http, status = headers.get(":status", "200"), headers.get("grpc-status", _OK)
    if http == "200" and status == _OK:
        return None
    text = headers.get("grpc-message", "")
    code = f"HTTP status {http}" if http != "200" else f"gRPC status {status}"
    return printable(f"{code} {text}".strip())[:LONGEST_REASON]
