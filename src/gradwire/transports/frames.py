"""Complete messages over a link, for the channels that the service thread reads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

from gradwire.transports.base import Link
from gradwire.wire import HEADER_BYTES, Header, parse

READ_AHEAD = 64 * 1024


class Sink(Protocol):
    """Receives frames. `begin` checks a header and returns memory for its payload; `finish` gets the full payload."""

    def begin(self, link: Link, header: Header) -> memoryview: ...
    def finish(self, link: Link, header: Header, payload: memoryview) -> None: ...


class Reader(Protocol):
    """Reads a link."""

    link: Link
    more: bool
    """Whether the last read filled its buffer, so that there may be more to read."""

    def pump(self) -> int:
        """Read once, and return the number of bytes. Raise `LinkClosed` at the end."""


class FrameReader:
    """Splits a link's stream into frames. Many small frames are read at once; large payloads go directly into place."""

    def __init__(self, link: Link, sink: Sink, lock: AbstractContextManager[object], ahead: int = READ_AHEAD) -> None:
        self.link = link
        self._sink = sink
        self._lock = lock  # held while bytes are written to the sink's memory, so that `redirect` can replace it
        self._ahead = memoryview(bytearray(ahead))
        self._start = 0
        self._end = 0
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._filled = 0
        self.more = False

    @property
    def missing(self) -> int:
        """The number of bytes of the current frame's payload that have not arrived yet."""
        return len(self._payload) - self._filled

    def pump(self) -> int:
        """Read once, pass complete frames to the sink, and return the number of bytes read.

        Raise `LinkClosed` at the end of the stream.
        """
        if self._header is not None and self._end == self._start:
            with self._lock:
                got = self.link.receive([self._payload[self._filled :]])
                self._filled += got
                self.more = self._filled == len(self._payload)
            self._complete()
            return got
        if self._start:
            self._ahead[: self._end - self._start] = self._ahead[self._start : self._end]
            self._end -= self._start
            self._start = 0
        got = self.link.receive([self._ahead[self._end :]])
        self._end += got
        self.more = self._end == len(self._ahead)
        self._cut()
        return got

    def redirect(self, old: memoryview, new: memoryview) -> None:
        """Make a payload that is arriving in `old` continue to arrive in `new`. The caller holds the sink's lock."""
        if self._header is not None and self._payload is old:
            new[: self._filled] = old[: self._filled]
            self._payload = new

    def _cut(self) -> None:
        while True:
            if self._header is None:
                if self._end - self._start < HEADER_BYTES:
                    return
                with self._lock:
                    self._header = parse(self._ahead[self._start : self._start + HEADER_BYTES])
                    self._start += HEADER_BYTES
                    self._payload = self._sink.begin(self.link, self._header)
                    self._filled = 0
            with self._lock:
                part = min(self._end - self._start, len(self._payload) - self._filled)
                if part:
                    self._payload[self._filled : self._filled + part] = self._ahead[self._start : self._start + part]
                self._filled += part
            self._start += part
            if not self._complete():
                return

    def _complete(self) -> bool:
        if self._header is None or self._filled < len(self._payload):
            return False
        header, payload = self._header, self._payload
        self._header, self._payload, self._filled = None, memoryview(b""), 0
        self._sink.finish(self.link, header, payload)
        return True


class Outbox:
    """The outgoing messages of a link. They are sent at once if there is room, otherwise by the thread that flushes."""

    MAX_WAITING = 8 * 1024 * 1024

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0  # bytes left to flush
        self._held = False

    @property
    def waiting(self) -> bool:
        """Whether something is left to flush, and no thread holds the link."""
        return bool(self._waiting) and not self._held

    @property
    def full(self) -> bool:
        return self.waiting_bytes > self.MAX_WAITING

    def post(self, message: bytes) -> bool:
        """Send a message after earlier ones, without blocking; True if something is left to flush."""
        with self._lock:
            rest = memoryview(message)
            if not self._waiting and not self._held:
                rest = rest[self.link.send([rest]) :]
            if rest:
                self._waiting.append(rest)
                self.waiting_bytes += len(rest)
            return bool(self._waiting)

    def flush(self) -> bool:
        """Send waiting messages as far as there is room; True when nothing is left."""
        with self._lock:
            if not self._held:
                self._send_waiting()
            return not self._waiting

    def hold(self) -> bool:
        """Reserve the link for the caller, which then writes to it directly; False if other messages must go first."""
        with self._lock:
            if self._held:
                return False
            self._send_waiting()
            self._held = not self._waiting
            return self._held

    def release(self) -> None:
        """End the reservation by `hold`."""
        with self._lock:
            self._held = False

    def _send_waiting(self) -> None:
        while self._waiting:
            message = self._waiting[0]
            sent = self.link.send([message])
            self.waiting_bytes -= sent
            if sent < len(message):
                self._waiting[0] = message[sent:]
                return
            self._waiting.popleft()
