"""Memory that ranks of one host share: found by sharing it, not by guessing.

Each rank has one arena: a nameless, sparse file in memory (memfd) that its peers map once. Its descriptor is passed
over a Unix socket in the abstract namespace, whose random name travels over the authenticated links, to processes of
the same user only. Nothing has a name in a file system, so nothing is left behind, however a process ends; the arena
is sealed against shrinking, so no peer can pull memory from under another.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

ARENA_BYTES = 64 << 30  # of address space; memory is taken when it is first written
PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # Linux: MAP_NORESERVE, which Python does not name
_GREETING = struct.Struct("<I16s")
_CREDENTIALS = struct.Struct("3i")


class Arena:
    """Memory of one rank, as it is mapped here."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)


class OwnArena(Arena):
    """This rank's arena: regions are carved from it and given back."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, ARENA_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._lock = threading.Lock()
        self._end = PAGE
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset

    def carve(self, nbytes: int) -> int:
        """The offset of a fresh region: zeroed, page-aligned."""
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= nbytes:
                    rest = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                    self._free[index : index + 1] = rest
                    return offset
            if self._end + nbytes > self.nbytes:
                raise MemoryError(f"no {nbytes} bytes left in the shared arena of {self.nbytes}")
            offset, self._end = self._end, self._end + nbytes
            return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a region; its memory goes back to the system at once."""
        nbytes = -(-nbytes // PAGE) * PAGE
        self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)
        with self._lock:
            self._free.append((offset, nbytes))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for start, length in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._free = merged


class SharedMemory:
    """The arenas of this rank and of the peers it shares memory with, by world rank."""

    def __init__(self, own: OwnArena, peers: dict[int, Arena]) -> None:
        self.own = own
        self.peers = peers


def share(
    rank: int, hosts: Sequence[object], wanted: bool, tell_all: Callable[[Any], list[Any]], deadline: float
) -> tuple[SharedMemory | None, tuple[bool, ...]]:
    """Exchange arenas with the ranks of this host; all ranks of the job call it together.

    `tell_all` gathers a value of every rank. A host shares memory if all its ranks can and want to. The result: this
    rank's share, and for each rank whether it has one.
    """
    arena, listener, name = None, None, ""
    if wanted and sum(host == hosts[rank] for host in hosts) > 1:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            arena = OwnArena()
            name = secrets.token_hex(16)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.bind("\0gradwire-" + name)
            listener.listen(len(hosts))
    try:
        names = tell_all(name)
        neighbours = [peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank]
        peers: dict[int, Arena] = {}
        if arena is not None and listener is not None and all(names[peer] for peer in neighbours):
            with contextlib.suppress(OSError):
                peers = _exchange(rank, neighbours, names, arena, listener, deadline)
    finally:
        if listener is not None:
            listener.close()
    complete = tell_all(arena is not None and bool(peers) and len(peers) == len(neighbours))
    unwilling = [host for peer, host in enumerate(hosts) if not complete[peer]]
    sharing = tuple(host not in unwilling for host in hosts)
    if arena is None:
        return None, sharing
    os.close(arena.descriptor)
    return (SharedMemory(arena, peers) if sharing[rank] else None), sharing


def _exchange(
    rank: int,
    neighbours: Sequence[int],
    names: Sequence[str],
    arena: OwnArena,
    listener: socket.socket,
    deadline: float,
) -> dict[int, Arena]:
    """Send this arena to all neighbours and map theirs: dial the lower ones, answer the higher ones, hear the lower."""
    peers: dict[int, Arena] = {}
    with contextlib.ExitStack() as open_sockets:
        dialled = []
        for peer in (one for one in neighbours if one < rank):
            sock = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            _limit(sock, deadline)
            sock.connect("\0gradwire-" + names[peer])
            _check_user(sock)
            _send(sock, rank, names[peer], arena)
            dialled.append((peer, sock))
        higher = {one for one in neighbours if one > rank}
        while higher:
            _limit(listener, deadline)
            sock, _ = listener.accept()
            open_sockets.enter_context(sock)
            _limit(sock, deadline)
            _check_user(sock)
            peer, mapped = _receive(sock, names[rank])
            if peer in higher:
                higher.remove(peer)
                peers[peer] = mapped
                _send(sock, rank, names[rank], arena)
        for peer, sock in dialled:
            said, peers[peer] = _receive(sock, names[peer])
            if said != peer:
                raise OSError(f"rank {said} answered in the place of rank {peer}")
    return peers


def _limit(sock: socket.socket, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))


def _check_user(sock: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} at a link of user {os.getuid()}")


def _send(sock: socket.socket, rank: int, name: str, arena: OwnArena) -> None:
    descriptors = array.array("i", [arena.descriptor])
    greeting = _GREETING.pack(rank, bytes.fromhex(name))
    sock.sendmsg([greeting], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


def _receive(sock: socket.socket, name: str) -> tuple[int, Arena]:
    greeting, descriptors, _, _ = socket.recv_fds(sock, _GREETING.size, 1)
    try:
        if len(greeting) != _GREETING.size or len(descriptors) != 1:
            raise OSError("a neighbour sent no memory")
        rank, said = _GREETING.unpack(greeting)
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if said != bytes.fromhex(name) or not seals & fcntl.F_SEAL_SHRINK:
            raise OSError("a neighbour's memory is not what was agreed on")
        return rank, Arena(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
