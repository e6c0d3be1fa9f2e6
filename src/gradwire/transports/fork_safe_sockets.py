"""Sockets that forked children close at once. Each socket is recorded before a fork can copy it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import TypeVar

S = TypeVar("S", bound=socket.socket)

_making = threading.RLock()  # held while a socket is created and recorded, and during forks
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


class Sockets:
    """The open sockets of one transport."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def open(self, host: str) -> socket.socket:
        """Return a new stream socket for a numeric address."""
        with _making:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._open.add(sock)
        return sock

    def open_unix(self) -> socket.socket:
        """Return a new stream socket for processes of this machine."""
        with _making:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._open.add(sock)
        return sock

    def pair(self, kind: type[S]) -> tuple[S, socket.socket]:
        """Return two stream sockets that are connected with each other. The first one is of this class."""
        with _making:
            one, two = socket.socketpair()
            first = kind(fileno=one.detach())
            self._open.update((first, two))
        return first, two

    def accept(self, listener: socket.socket) -> tuple[socket.socket, str]:
        """Accept the next connection of a non-blocking listener, and return it with its source address."""
        with _making:
            sock, address = listener.accept()
            self._open.add(sock)
        return sock, f"{address[0]}:{address[1]}"

    def abandon(self) -> None:
        """Close this process's descriptors, in a forked child. The parent's connections stay open."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.close()
