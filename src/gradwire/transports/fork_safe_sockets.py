"""Sockets that forked children close at once: each is recorded before any fork can copy it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref

_making = threading.RLock()  # held from the birth of a socket to its entry, and during forks
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


class Sockets:
    """The open sockets of one transport."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def open(self, host: str) -> socket.socket:
        """A new stream socket, of the family of a numeric address."""
        with _making:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._open.add(sock)
        return sock

    def open_unix(self) -> socket.socket:
        """A new stream socket between processes of this machine."""
        with _making:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._open.add(sock)
        return sock

    def accept(self, listener: socket.socket) -> tuple[socket.socket, str]:
        """The next connection of a listener that does not block, and where it comes from."""
        with _making:
            sock, address = listener.accept()
            self._open.add(sock)
        return sock, f"{address[0]}:{address[1]}"

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors; the parent goes on using the connections."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.close()
