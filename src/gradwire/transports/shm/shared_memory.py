"""Shares memory between the ranks of one host. The ranks find out by trying whether they can.

Each rank has one arena: an unnamed, sparse file in memory (memfd) that its peers map once. A rank sends its descriptor
over a Unix socket in the abstract namespace, only to processes of the same user that show a token. The tokens travel
over the authenticated links. Nothing has a name in a file system, so nothing remains after a process ends, however it
ends. The arena is sealed against shrinking, so that no peer can make another one crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence

from gradwire.host import machine
from gradwire.transports.base import LIFE_CHANNEL, Buffer, LinkClosed
from gradwire.transports.shm.arena import ARENA_BYTES, RESERVED, SEALS, Arena, OwnArena

__all__ = ["Arena", "OwnArena", "PidfdLink", "SharedMemory", "Sharing"]

TOKEN_BYTES = 16
WAITING = 4096  # connections in the backlog, including those of unrelated processes
CONNECT_SECONDS = 10.0  # a Unix socket connects at once, unless other processes fill its backlog
GREETING = struct.Struct(f"<I{TOKEN_BYTES}sQ")  # sent with an arena: rank, token, start time of the process
_CREDENTIALS = struct.Struct("3i")
_OFFER = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")


class SharedMemory:
    """This rank's arena, and the arenas and pidfds of the peers that share memory with it, by world rank."""

    def __init__(self, own: OwnArena, peers: dict[int, Arena], pidfds: dict[int, int]) -> None:
        self.own = own
        self.peers = peers
        self.pidfds = pidfds

    def died(self, peer: int, seconds: float = 0.0) -> bool:
        """Whether a peer's process has ended, or ends within this time."""
        pidfd = self.pidfds.get(peer, -1)
        if pidfd < 0:
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close the pidfds. The memory is freed with the last reference to it, because arrays may still use it."""
        while self.pidfds:
            os.close(self.pidfds.popitem()[1])

    def abandon(self) -> None:
        """Close the pidfds in a forked child. The memory belongs to its parent."""
        self.close()


class PidfdLink:
    """A peer's process in the form of a link that delivers only its end, so that the service thread can wait for it."""

    channel = LIFE_CHANNEL

    def __init__(self, peer: int, shared: SharedMemory) -> None:
        self.peer = peer
        self._shared = shared

    def fileno(self) -> int:
        return self._shared.pidfds.get(self.peer, -1)

    def send(self, buffers: Sequence[Buffer]) -> int:
        raise LinkClosed

    def receive(self, buffers: Sequence[memoryview]) -> int:
        if self._shared.died(self.peer):
            raise LinkClosed
        return 0

    def close(self) -> None:
        """Do nothing: `SharedMemory` owns the descriptor and closes it."""


class Sharing:
    """The steps by which a rank begins to share memory with its neighbours, the other ranks of its host.

    All ranks of a job take these steps together, and gather the results of a step before the next one. So no step waits
    for a socket: everything that a neighbour has sent is there already. A host shares memory if all of its ranks can
    and want to.
    """

    def __init__(self, rank: int, hosts: Sequence[object], wanted: bool) -> None:
        self._rank = rank
        self._hosts = hosts
        self._neighbours = [peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank]
        self._exchange: _ArenaExchange | None = None
        if wanted and self._neighbours:
            with contextlib.suppress(OSError, AttributeError):  # the system does not support it
                self._exchange = _ArenaExchange(rank)

    @property
    def arena(self) -> OwnArena | None:
        """This rank's arena, if it has one to share."""
        return self._exchange.arena if self._exchange is not None else None

    def offer(self) -> list[str] | None:
        """Return, as the first step, the socket name and token that neighbours need."""
        return self._exchange.offer if self._exchange is not None else None

    def dial(self, offers: Sequence[object], deadline: float) -> bool:
        """Send, as the second step, this rank's arena to the neighbours. Return whether it reached them."""
        return self._exchange is not None and self._exchange.dial(self._neighbours, offers, deadline)

    def answer(self, dialled: Sequence[object]) -> bool:
        """Receive, as the third step, the neighbours' arenas. Return whether all of them were there."""
        if self._exchange is None or not all(dialled[peer] is True for peer in (self._rank, *self._neighbours)):
            return False
        self._exchange.answer(self._neighbours)
        return len(self._exchange.peers) == len(self._neighbours)

    def keep(self, complete: Sequence[object]) -> tuple[SharedMemory | None, tuple[bool, ...]]:
        """Return, as the last step, the shared memory of this rank, and for each rank whether it shares memory."""
        lacking = {host for peer, host in enumerate(self._hosts) if complete[peer] is not True}
        sharing = tuple(host not in lacking for host in self._hosts)
        return (self._exchange.keep() if self._exchange is not None and sharing[self._rank] else None), sharing

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange.close()


class _ArenaExchange:
    """Exchanges arenas with the neighbours of a rank: each rank dials all others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peers: dict[int, Arena] = {}
        self._pidfds: dict[int, int] = {}
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._sockets = contextlib.ExitStack()
        self.arena = OwnArena()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            self._listener = self._sockets.enter_context(_unix_socket())
            # Any process can see the names of abstract sockets, but not the token.
            self._name = secrets.token_hex(TOKEN_BYTES)
            self._listener.bind(abstract_address(self._name))
            self._listener.listen(WAITING)
            cleanup.pop_all()

    @property
    def offer(self) -> list[str]:
        """The socket name and the token that neighbours need."""
        return [self._name, self._token.hex()]

    def dial(self, neighbours: Sequence[int], offers: Sequence[object], deadline: float) -> bool:
        """Send the arena to all neighbours. Return whether it reached them."""
        deadline = min(deadline, time.monotonic() + CONNECT_SECONDS)
        try:
            for peer in neighbours:
                name, token = _checked_offer(offers[peer])
                sock = self._sockets.enter_context(_unix_socket())
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(abstract_address(name))
                _check_user(sock)
                greeting = GREETING.pack(self.rank, token, _started(os.getpid()))
                socket.send_fds(sock, [greeting], [self.arena.descriptor])
        except (OSError, ValueError):
            return False
        return True

    def answer(self, neighbours: Sequence[int]) -> None:
        """Receive the arenas of the neighbours, which have all dialled. Other connections are closed."""
        self._listener.setblocking(False)
        for _ in range(WAITING):
            if len(self.peers) == len(neighbours):
                return
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError, ValueError):
                sock.setblocking(False)
                pid = _check_user(sock)
                self._admit(sock, pid, neighbours)

    def _admit(self, sock: socket.socket, pid: int, neighbours: Sequence[int]) -> None:
        greeting, descriptors, flags, _ = socket.recv_fds(sock, GREETING.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(greeting) != GREETING.size or len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
                raise ValueError("not a neighbour's greeting")
            peer, token, started = GREETING.unpack(greeting)
            if not secrets.compare_digest(token, self._token) or peer not in neighbours or peer in self.peers:
                raise ValueError("not a neighbour")
            _check_arena(descriptors[0])
            self.peers[peer] = Arena(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if pid > 0:  # 0 means another pid namespace
            with contextlib.suppress(OSError, AttributeError):
                self._pidfds[peer] = _pidfd(pid, started)

    def keep(self) -> SharedMemory:
        """Return the exchanged arenas and pidfds."""
        shared = SharedMemory(self.arena, self.peers, self._pidfds)
        self._pidfds = {}
        return shared

    def close(self) -> None:
        """Close the sockets, and the pidfds that `keep` did not return."""
        self._sockets.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def _started(pid: int) -> int:
    """Return the start time of a process; 0 if it cannot be known."""
    status = machine.process_status(pid)
    return status.started if status is not None else 0


def _pidfd(pid: int, started: int) -> int:
    """Return a pidfd of the process with this start time. Raise OSError if it has ended, even if the pid is in use."""
    pidfd = os.pidfd_open(pid)
    if _started(pid) != started:
        os.close(pidfd)
        raise ProcessLookupError(f"process {pid} has ended")
    return pidfd


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def abstract_address(name: str) -> str:
    """Return the address of the Unix socket with this name."""
    return f"\0gradwire-{name}"


def _checked_offer(offer: object) -> tuple[str, bytes]:
    """Return the socket name and token of an offer; raise ValueError if it is missing or malformed."""
    match offer:
        case [str(name), str(token)] if _OFFER.fullmatch(name) and _OFFER.fullmatch(token):
            return name, bytes.fromhex(token)
    raise ValueError("no offer")


def _check_user(sock: socket.socket) -> int:
    """Return the pid of the process at the other end; raise `PermissionError` if it belongs to another user."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user} connected to a process of user {os.geteuid()}")
    return int(pid)


def _check_arena(descriptor: int) -> None:
    """Raise ValueError unless this is a sealed file of a valid size."""
    status = os.fstat(descriptor)
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    if not stat.S_ISREG(status.st_mode) or not sealed or not RESERVED < status.st_size <= ARENA_BYTES:
        raise ValueError("not an arena")
