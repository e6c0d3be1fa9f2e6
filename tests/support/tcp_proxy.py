"""A TCP proxy between two ranks that records, alters, delays or drops connections."""

from __future__ import annotations

import contextlib
import socket
import threading

JOIN_SECONDS = 10.0


class TcpProxy:
    """Forwards connections to `target`, and records the bytes of the connecting side.

    The first `hang_up` connections are closed at once; the others are forwarded as soon as `opened` is set.
    """

    def __init__(self, target: tuple[str, int], hang_up: int = 0, opened: threading.Event | None = None) -> None:
        self.said = bytearray()
        self.calls = 0
        self.spoils = False  # whether to flip a bit in each piece of data of the connecting side
        self._target = target
        self._hang_up = hang_up
        self._opened = opened
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._ends = [self._listener]
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self.calls += 1
                if self.calls <= self._hang_up:
                    caller.close()
                    continue
                self._ends.append(caller)
                if self._opened is not None:
                    self._opened.wait()
                target = socket.create_connection(self._target)
                self._ends.append(target)
                for source, sink, records in ((caller, target, True), (target, caller, False)):
                    thread = threading.Thread(target=self._forward, args=(source, sink, records), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, records: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if records:
                    self.said += data
                    if self.spoils:
                        data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.set()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
