"""System resources of the proxy: a socket that only this process can reach, and enough descriptors.

Both are undone by `close`; a forked child calls `abandon`.
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

_FOR_EACH = 3  # descriptors of a connection: the client's, and both ends of the one to the server
_OTHERS = 256  # descriptors of this process that are no connections


class PrivateAddress:
    """Where only this process can connect to: a Unix socket without a name.

    A server binds to `path`, in a folder that only this user may enter. `hide` then removes both from the file system.
    A descriptor is left to connect by, so nobody else can, and nothing stays behind, however this process ends.
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
        """Short, wherever the folder is: the path of a Unix socket has at most 107 characters."""
        return f"/proc/self/fd/{self._directory}/socket"

    def hide(self) -> None:
        """The server is bound."""
        self._socket = os.open(self.path, os.O_PATH)
        self._remove()

    def connect(self, sock: socket.socket) -> None:
        sock.connect(f"/proc/self/fd/{self._socket}")

    def close(self) -> None:
        """Idempotent."""
        self._remove()
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the parent needs the address still."""
        for descriptor in (self._socket, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._socket = self._directory = -1

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, "socket"))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


class DescriptorRoom:
    """Raises the number of descriptors that this process may have, up to what the system allows without asking.

    `limits` are the given ones, lowered to what that is enough for.
    """

    def __init__(self, limits: Limits) -> None:
        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OTHERS + limits.strangers + _FOR_EACH * (limits.unproven + limits.proven)
        self._raised = soft
        if soft != resource.RLIM_INFINITY and soft < wanted:
            self._raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._raised, hard))
        present = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = wanted if present == resource.RLIM_INFINITY else max(0, present - _OTHERS)
        strangers = min(limits.strangers, max(room // 4, 1))
        unproven = min(limits.unproven, max(strangers // _FOR_EACH, 1))
        proven = min(limits.proven, max((room - strangers) // _FOR_EACH - unproven, 1))
        self.limits = dataclasses.replace(limits, strangers=strangers, unproven=unproven, proven=proven)

    def close(self) -> None:
        """Lower the number to what it was, unless it was changed since."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == self._raised != self._before[0]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._before[0], hard))
