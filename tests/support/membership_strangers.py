"""Clients of a coordinator that do not know its secret: they begin calls without a body, and reconnect when closed."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from h2.connection import H2Connection

from gradwire.membership.endpoints import split


def connect(address: str) -> socket.socket:
    return socket.create_connection(split(address), timeout=30.0)


def begin_calls(address: str, calls: int) -> socket.socket:
    """Open a connection and begin calls whose request never arrives."""
    sock, http = connect(address), H2Connection()
    http.initiate_connection()
    for number in range(calls):
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/gradwire.membership.v1.Membership/RegisterWorker",
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        http.send_headers(2 * number + 1, list(headers.items()))
    sock.sendall(http.data_to_send())
    return sock


def closed(sock: socket.socket) -> bool:
    """Read until the end of the connection; False if it does not come within the socket's timeout."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class Attack:
    """Keeps `connections` open with `calls` on each, and replaces those that are closed."""

    def __init__(self, address: str, connections: int, calls: int) -> None:
        self._address, self._calls = address, calls
        self._open = [begin_calls(address, calls) for _ in range(connections)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._open:
            sock.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for sock in select.select(self._open, [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    if sock.recv(1 << 16):
                        continue
                sock.close()
                self._open.remove(sock)
                with contextlib.suppress(OSError):
                    self._open.append(begin_calls(self._address, self._calls))
