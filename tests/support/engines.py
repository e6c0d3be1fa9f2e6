"""Engines of a user's own, as examples of `gw.Communicator`: ranks as threads, and ranks as processes with sockets."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from gradwire.arrays import Array
from support.ranks import HANG_SECONDS

OPS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class Board:
    """A place where the threads of one job exchange arrays: they all write, wait, read, and wait again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=HANG_SECONDS)

    def exchange(self, rank: int, x: Array) -> list[Array]:
        self._slots[rank] = x.copy()
        self._barrier.wait()
        everything = list(self._slots)
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class ThreadEngine:
    """A rank as a thread. The reductions add in rank order."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.size = rank, board.size
        self.seen: set[tuple[str, str, str]] = set()  # call, dtype and op
        self._board = board

    def abort(self, reason: str) -> None:
        self._board.abort()

    def all_reduce(self, x: Array, op: str = "sum") -> Array:
        self.seen.add(("all_reduce", x.dtype.name, op))
        x[...] = reduce(OPS[op], self._board.exchange(self.rank, x))
        return x

    def broadcast(self, x: Array, root: int = 0) -> Array:
        self.seen.add(("broadcast", x.dtype.name, ""))
        x[...] = self._board.exchange(self.rank, x)[root]
        return x

    def all_gather(self, x: Array) -> Array:
        self.seen.add(("all_gather", x.dtype.name, ""))
        return np.concatenate(self._board.exchange(self.rank, x))


class RichThreadEngine(ThreadEngine):
    """The same, with the two optional names."""

    generation = 7

    def all_to_all(self, x: Array, send_counts: list[int], recv_counts: list[int]) -> Array:
        self.seen.add(("all_to_all", x.dtype.name, ""))
        rows = self._board.exchange(self.rank, np.array(send_counts))
        parts = self._board.exchange(self.rank, x)
        split = [np.split(part, np.cumsum(row)[:-1])[self.rank] for part, row in zip(parts, rows, strict=True)]
        assert [one.size for one in split] == recv_counts
        return np.concatenate(split)


def thread_engines(size: int, kind: Callable[[Board, int], ThreadEngine] = ThreadEngine) -> list[ThreadEngine]:
    board = Board(size)
    return [kind(board, rank) for rank in range(size)]


class SocketEngine:
    """A rank as a process. Rank 0 has a connection to each other rank; it collects the arrays and sends them all back.

    Every rank computes the results from the arrays of all ranks, in rank order, and returns new arrays.
    """

    def __init__(self, rank: int, size: int, connections: list[socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._connections = connections  # of rank 0: to the ranks 1, 2 …; of other ranks: to rank 0

    def all_reduce(self, x: Array, op: str = "sum") -> Array:
        return np.asarray(reduce(OPS[op], self._exchange(x)))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self._exchange(x)[root]

    def all_gather(self, x: Array) -> list[Array]:
        return self._exchange(x)

    def _exchange(self, x: Array) -> list[Array]:
        if self.rank:
            _send(self._connections[0], x.tobytes())
            data = _receive(self._connections[0])
        else:
            data = x.tobytes() + b"".join(map(_receive, self._connections))
            for connection in self._connections:
                _send(connection, data)
        return list(np.frombuffer(data, x.dtype).reshape(self.size, *x.shape))


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("!Q", len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    (length,) = struct.unpack("!Q", _exactly(connection, 8))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("a rank closed its connection")
        data += part
    return bytes(data)
