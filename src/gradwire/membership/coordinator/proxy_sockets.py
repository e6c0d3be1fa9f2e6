"""Provides the proxy's system resources: a socket that only this process can reach, and enough descriptors.

`close` releases both. A forked child calls `abandon`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import tempfile

from gradwire.errors import TransportError
from gradwire.membership.coordinator.connection_limits import Limits

_PER_CONNECTION = 3  # descriptors: the client's socket, and both ends of the connection to the server
_OTHERS = 256  # descriptors that this process needs for other purposes


class PrivateAddress:
    """A Unix socket without a name, to which only this process can connect.

    The server binds to `path`, in a folder that only this user may enter. `hide` then removes both from the file
    system. This process can still connect through an open descriptor. Other processes cannot, and no file is left
    behind when this process is killed.
    """

    def __init__(self) -> None:
        try:
            self._folder = tempfile.mkdtemp(prefix="gradwire-")
            self._directory = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise TransportError(f"the coordinator needs a folder for temporary files: {error}") from error
        self._socket = -1

    @property
    def path(self) -> str:
        """The path to bind to. It is short, because the path of a Unix socket may have at most 107 characters."""
        return f"/proc/self/fd/{self._directory}/socket"

    def hide(self) -> None:
        """Remove the socket from the file system, after the server has bound to it."""
        self._socket = os.open(self.path, os.O_PATH)
        self._remove()

    def connect(self, sock: socket.socket) -> None:
        sock.connect(f"/proc/self/fd/{self._socket}")

    def close(self) -> None:
        """Idempotent."""
        self._remove()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors in a forked child. The parent keeps the address."""
        for descriptor in (self._socket, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._socket = self._directory = -1

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, "socket"))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


class DescriptorLimit:
    """Raises this process's limit of descriptors, up to the hard limit.

    `limits` are the given limits, lowered if there are not enough descriptors for them.
    """

    def __init__(self, limits: Limits) -> None:
        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OTHERS + limits.unauthenticated + _PER_CONNECTION * (limits.unproven + limits.proven)
        self._raised = soft
        if soft != resource.RLIM_INFINITY and soft < wanted:
            self._raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._raised, hard))
        current = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        available = wanted if current == resource.RLIM_INFINITY else max(0, current - _OTHERS)
        unauthenticated = min(limits.unauthenticated, max(available // 4, 1))
        unproven = min(limits.unproven, max(unauthenticated // _PER_CONNECTION, 1))
        proven = min(limits.proven, max((available - unauthenticated) // _PER_CONNECTION - unproven, 1))
        self.limits = dataclasses.replace(limits, unauthenticated=unauthenticated, unproven=unproven, proven=proven)

    def close(self) -> None:
        """Restore the previous limit, unless it was changed in the meantime."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == self._raised != self._before[0]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._before[0], hard))
