"""Makes gRPC calls on a plain socket: HTTP/2 with h2, without threads.

A process that trains may fork data loaders at any time. gRPC's own client does not support that: its threads outlive
each call, and a fork while they run can crash the child, and the parent too. Here a call only sends and receives bytes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from gradwire.security.admission import printable

SERVICE = "gradwire.membership.v1.Membership"
# The names of the values of grpc-status, in their order.
_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_PREFIX = struct.Struct(">BI")  # of a gRPC message: whether it is compressed, and its length
_FRAME, _LARGEST_FRAME, _GOAWAY = 9, 16 << 10, 7  # HTTP/2: bytes of a frame header, the allowed payload, a frame type
# Only received headers are validated. The headers that this module sends are known to be valid.
_SETTINGS = H2Configuration(
    client_side=True, header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
)
_WINDOW = 1 << 20  # flow control: bytes that the server may send before it must wait for an acknowledgement


class CallFailed(Exception):
    """A call or its connection failed. `code` is gRPC's name of the status."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


class Connection:
    """Makes calls over a connected socket, one at a time, and owns the socket.

    Its methods raise `CallFailed`, or `ssl.SSLError` if TLS fails. After either, the connection is unusable.
    """

    def __init__(self, sock: socket.socket, authority: str, largest: int) -> None:
        self._socket = sock
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._authority = authority
        self._largest = largest  # bytes of a reply
        self._received = bytearray()
        self._ending = False
        self._exchange = _Exchange(0)
        self._h2 = H2Connection(_SETTINGS)
        self._h2.local_settings[SettingCodes.ENABLE_PUSH] = 0
        self._h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = _WINDOW
        self._h2.local_settings.acknowledge()  # makes the settings take effect from the first frame on
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW)

    def call(self, method: str, message: bytes, timeout: float, service: str = SERVICE) -> bytes:
        """Send one message and return the reply."""
        deadline = time.monotonic() + timeout
        self._begin(method, service, [("grpc-timeout", f"{max(1, round(timeout * 1000))}m")])
        self._send(message, deadline, end=True)
        while not self._exchange.ended:
            self._progress(deadline)
        return self._exchange.only_reply(self._largest)

    def begin_stream(self, method: str, service: str = SERVICE) -> None:
        """Begin a stream. Use `ask` for its messages."""
        self._begin(method, service, [])

    def ask(self, message: bytes, timeout: float) -> bytes:
        """Send a message on the stream and return the reply to it."""
        deadline = time.monotonic() + timeout
        self._send(message, deadline, end=False)
        while (reply := self._exchange.next_reply(self._largest)) is None:
            if self._exchange.ended:
                self._exchange.check_status()
                raise CallFailed("UNAVAILABLE", "it ended the stream")
            self._progress(deadline)
        return reply

    def close(self) -> None:
        """Close the socket, even during a call."""
        self._socket.close()

    def _begin(self, method: str, service: str, more: list[tuple[str, str]]) -> None:
        if self._ending:
            raise CallFailed("UNAVAILABLE", "it is stopping")
        self._exchange = _Exchange(self._h2.get_next_available_stream_id())
        headers = [
            (":method", "POST"),
            (":scheme", "https" if self._secure else "http"),
            (":path", f"/{service}/{method}"),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]
        with _http2_errors():
            self._h2.send_headers(self._exchange.stream, headers)

    def _send(self, message: bytes, deadline: float, *, end: bool) -> None:
        left = memoryview(_PREFIX.pack(0, len(message)) + message)
        stream = self._exchange.stream
        while left and not self._exchange.ended:  # a refusal may arrive before the whole message is sent
            with _http2_errors():
                room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                self._progress(deadline)
                continue
            part, left = left[:room], left[room:]
            with _http2_errors():
                self._h2.send_data(stream, part, end_stream=end and not left)
        self._flush(deadline)

    def _progress(self, deadline: float) -> None:
        """Send the pending bytes, then receive and process the next ones."""
        self._flush(deadline)
        with self._bounded_wait(deadline):
            data = self._socket.recv(1 << 16)
        if not data:
            raise CallFailed("UNAVAILABLE", "it closed the connection")
        self._received += data
        with _http2_errors():
            for frame in self._frames():
                for event in self._h2.receive_data(frame):
                    self._handle(event)

    def _flush(self, deadline: float) -> None:
        with self._bounded_wait(deadline):
            self._socket.sendall(self._h2.data_to_send())

    @contextlib.contextmanager
    def _bounded_wait(self, deadline: float) -> Iterator[None]:
        left = deadline - time.monotonic()
        try:
            if left <= 0:  # the deadline applies even if there are bytes to read
                raise TimeoutError
            self._socket.settimeout(left)
            yield
        except TimeoutError as error:
            raise CallFailed("DEADLINE_EXCEEDED", "it did not answer in time") from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise CallFailed("UNAVAILABLE", "it closed the connection") from error
        except ssl.SSLError:
            raise
        except OSError as error:
            raise CallFailed("UNAVAILABLE", error.strerror or str(error)) from error

    def _frames(self) -> Iterator[bytes]:
        """Yield the complete frames received, except GOAWAY: after a GOAWAY, h2 would reject further replies."""
        while len(self._received) >= _FRAME:
            length = int.from_bytes(self._received[:3], "big")
            if length > _LARGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes, and at most {_LARGEST_FRAME} are allowed")
            if len(self._received) < _FRAME + length:
                return
            frame = bytes(self._received[: _FRAME + length])
            del self._received[: _FRAME + length]
            if frame[3] != _GOAWAY:
                yield frame
                continue
            self._ending = True
            if int.from_bytes(frame[_FRAME : _FRAME + 4], "big") < self._exchange.stream:
                raise CallFailed("UNAVAILABLE", "it is stopping")

    def _handle(self, event: Event) -> None:
        exchange = self._exchange
        if getattr(event, "stream_id", None) != exchange.stream:
            return
        if isinstance(event, ResponseReceived | TrailersReceived):
            exchange.headers.update((str(name), str(value)) for name, value in event.headers or ())
        elif isinstance(event, DataReceived):
            exchange.body += event.data or b""
            if len(exchange.body) > self._largest + _PREFIX.size:
                raise CallFailed("RESOURCE_EXHAUSTED", f"its reply has more than {self._largest} bytes")
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, exchange.stream)
        elif isinstance(event, StreamEnded):
            exchange.ended = True
        elif isinstance(event, StreamReset) and not exchange.ended:  # after the status, a reset only stops this sender
            refused = event.error_code == ErrorCodes.REFUSED_STREAM
            raise CallFailed("UNAVAILABLE" if refused else "CANCELLED", "it aborted the call")


@contextlib.contextmanager
def _http2_errors() -> Iterator[None]:
    """Raise errors of HTTP/2 as `CallFailed`. Sending can fail too, because of frames received before."""
    try:
        yield
    except (H2Error, ValueError) as error:
        raise CallFailed("UNAVAILABLE", f"it does not answer in valid HTTP/2 ({type(error).__name__})") from error


class _Exchange:
    """A call in progress."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.ended = False

    def next_reply(self, largest: int) -> bytes | None:
        """Return the first message received, or None if it is not complete yet."""
        if len(self.body) < _PREFIX.size:
            return None
        compressed, length = _PREFIX.unpack_from(self.body)
        if compressed or length > largest:
            raise CallFailed("INTERNAL", "its reply is compressed or too large")
        if len(self.body) < _PREFIX.size + length:
            return None
        reply = bytes(self.body[_PREFIX.size : _PREFIX.size + length])
        del self.body[: _PREFIX.size + length]
        return reply

    def only_reply(self, largest: int) -> bytes:
        self.check_status()
        reply = self.next_reply(largest)
        if reply is None or self.body:
            raise CallFailed("INTERNAL", "its reply is not one message")
        return reply

    def check_status(self) -> None:
        """Raise `CallFailed` unless the call has succeeded."""
        status, http = self.headers.get("grpc-status", ""), self.headers.get(":status", "")
        if status == "0":
            return
        if not status.isdecimal() or len(status) > 2 or int(status) >= len(_CODES):
            raise CallFailed("UNKNOWN" if http == "200" else "UNIMPLEMENTED", f"HTTP status {printable(http)[:10]}")
        raise CallFailed(_CODES[int(status)], printable(unquote(self.headers.get("grpc-message", "")))[:1000])
