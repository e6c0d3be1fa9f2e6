"""Connects the launchers of a job of fixed size, one on each host ("node"), in a group of their own.

The launchers are the ranks of this group: the rank of a launcher is its node rank. Node 0 serves the rendezvous. The
group carries what the launchers agree on before the workers start (the number of ranks on each host, the address of
the workers' coordinator), and after that the news that a node's workers failed, were stopped, or have ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.errors import Closed, ConfigError, GradwireError, NoConnection, Refused, Timeout, TransportError
from gradwire.group import Group
from gradwire.job import config, config_file
from gradwire.job.address import Address, check_encrypted
from gradwire.job.config import JobConfig
from gradwire.job.init import member_session
from gradwire.launch.coordinator_wait import await_coordinator
from gradwire.membership.types import LARGEST_JOB
from gradwire.security import tokens
from gradwire.security.credentials import CA, CERT, KEY
from gradwire.security.secret import TOKEN
from gradwire.wire import parse_json

# A network that fails for a moment between two launchers does not end the job: the workers decide what is too long. A
# launcher that has ended is noticed at once by its closed links, and one that is stopped after 5 s.
LEAST_PEER_SECONDS = 30.0
_SEND_SECONDS = 5.0
_QUIET_SECONDS = 2.0  # of each wait for a message: the group logs longer waits, and here they are normal
_CHUNK = 1 << 15  # bytes that are sent without waiting for the receiver
_LONGEST_MESSAGE = 1 << 26
_LENGTH, _BODY = 0, 1  # tags
_SETTINGS = (config.TIMEOUT, config.PEER_TIMEOUT, config.INSECURE, config.JOB, CA, CERT, KEY)


@dataclass(frozen=True)
class RankLayout:
    """Which ranks run on which host; `hosts` and `workers` are indexed by node rank."""

    node: int
    hosts: tuple[str, ...]
    workers: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.workers)

    @property
    def first_rank(self) -> int:
        """The lowest rank on this host."""
        return sum(self.workers[: self.node])

    @property
    def local_size(self) -> int:
        return self.workers[self.node]


def node_config(
    node: int, nodes: int, address: Address, environ: Mapping[str, str], *, insecure: bool, job: str | None
) -> JobConfig:
    """Return the configuration of the launchers' group. Raise `ConfigError` if this host may not use the address."""
    settings = {name: environ[name] for name in _SETTINGS if name in environ} | ({config.JOB: job} if job else {})
    found = config.resolve(node, nodes, address, transport="tcp", insecure=insecure, environ={**settings})
    check_encrypted(address, insecure=found.insecure, credentials=found.tls)
    # The session of this launcher reads the secret from the variable or from a file.
    token = None if os.environ.get(TOKEN) else config_file.named_by(environ).get("token_file")
    return found.replace(
        peer_timeout=max(found.peer_timeout, LEAST_PEER_SECONDS), token_file=token.value if token else None
    )


class NodeGroup:
    """The launchers of a job, connected. A thread receives their messages."""

    def __init__(self, group: Group, layout: RankLayout) -> None:
        self.layout = layout
        self.problem: GradwireError | None = None  # why the launchers are no longer connected
        self._group = group
        self._receive: Callable[[int, Any], bool] = lambda node, message: True
        self._thread: threading.Thread | None = None

    def broadcast(self, value: Any = None) -> Any:
        """Return node 0's value on all nodes."""
        try:
            return self._group.broadcast_value(value, root=0)
        except GradwireError as error:
            raise TransportError(f"node 0 did not start its coordinator: {in_nodes(str(error))}") from error

    def start(self, receive: Callable[[int, Any], bool]) -> None:
        """Call `receive` with each message and its node until it returns False; with None when the group breaks.

        The calls come from a thread of this object.
        """
        self._receive = receive
        self._thread = threading.Thread(target=self._run, name="gradwire-nodes", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Send a message to all other nodes, as far as they can be reached."""
        body = np.frombuffer(json.dumps(message).encode(), np.uint8)
        length = np.array([len(body)], np.int64)
        for node in range(self._group.size):
            if node == self._group.rank:
                continue
            with contextlib.suppress(GradwireError):
                self._group.send(length, node, _LENGTH, _SEND_SECONDS)
                for begin in range(0, len(body), _CHUNK):
                    self._group.send(body[begin : begin + _CHUNK], node, _BODY, _SEND_SECONDS)

    def close(self) -> None:
        self._group.close()
        if self._thread is not None:
            self._thread.join()

    def abort(self, reason: str) -> None:
        """Break the group, so that the other launchers do not wait for this one."""
        self._group.abort(reason)
        self.close()

    def _run(self) -> None:
        try:
            while self._receive(*self._next()):
                pass
        except Closed:
            pass
        except GradwireError as error:
            node = getattr(error, "culprit", None)
            name = f"node {node} (host {self.layout.hosts[node]})" if isinstance(node, int) else "another node"
            self.problem = TransportError(f"the launcher of {name} has ended, was suspended or cannot be reached")
            self._receive(-1, None)

    def _next(self) -> tuple[int, Any]:
        length = np.zeros(1, np.int64)
        node = None
        while node is None:
            with contextlib.suppress(Timeout):  # without news for a long time: nothing has failed
                node = self._group.recv(length, None, _LENGTH, _QUIET_SECONDS)
        count = int(length[0])
        if not 0 < count <= _LONGEST_MESSAGE:
            raise TransportError(f"node {node} announced a message of {count} bytes")
        body = np.zeros(count, np.uint8)
        for begin in range(0, count, _CHUNK):
            self._group.recv(body[begin : begin + _CHUNK], node, _BODY)
        try:
            return node, parse_json(body.tobytes())
        except ValueError as error:
            raise TransportError(f"node {node} sent a malformed message") from error


def join_nodes(
    settings: JobConfig, workers: int, environ: Mapping[str, str], report: Callable[[str], None]
) -> NodeGroup:
    """Wait until the launchers of all nodes are connected; `report` gets lines that say which nodes are missing."""
    assert settings.address is not None
    assert settings.rank is not None
    deadline = time.monotonic() + settings.timeout
    try:
        if settings.rank > 0:
            secret = tokens.secret_or_token(environ, settings.address.is_loopback())
            await_coordinator(
                str(settings.address), secret, settings.tls, settings.timeout, report, until=" (node 0 is missing)"
            )
        with _waiting_to(report):
            group = member_session(settings).join_next(deadline)
        return NodeGroup(group, _layout(group, workers))
    except (NoConnection, Refused, Timeout) as error:
        raise type(error)(f"node {settings.rank} cannot join the job: {in_nodes(str(error))}") from error


def _layout(group: Group, workers: int) -> RankLayout:
    facts = group.all_gather_values({"workers": workers, "host": socket.gethostname()})
    counts, hosts = [], []
    for node, fact in enumerate(facts):
        match fact:
            case {"workers": int(count), "host": str(host)} if 0 < count <= LARGEST_JOB:
                counts.append(count)
                hosts.append(host)
            case _:
                raise ConfigError(f"node {node} runs another version of gradwire: install the same one on all nodes")
    return RankLayout(group.rank, tuple(hosts), tuple(counts))


def in_nodes(text: str) -> str:
    """Replace ranks by nodes in a message about the launchers' rendezvous: its ranks are the nodes.

    >>> in_nodes("missing ranks 1, 2 of 4")
    'missing nodes 1, 2 of 4'
    """
    return re.sub(r"\brank(s?)\b", r"node\1", text)


class _ReportHandler(logging.Handler):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(in_nodes(record.getMessage()))


@contextlib.contextmanager
def _waiting_to(report: Callable[[str], None]) -> Iterator[None]:
    """Report what the rendezvous logs: which nodes are missing."""
    logger, handler = logging.getLogger("gradwire"), _ReportHandler(report)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
