"""Provides `WorkerNode`: membership for programs that decide themselves when to use a group, or bring a data plane."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gradwire.errors import Closed, ConfigError, GradwireError, Timeout
from gradwire.group import Group
from gradwire.job import data_links
from gradwire.job.node_group import NodeGroup, config_of
from gradwire.membership.endpoints import resolve, split
from gradwire.membership.types import Assembly, Member
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.tokens import Token

if TYPE_CHECKING:
    from gradwire.job.health_server import HealthServer
    from gradwire.membership.client.worker_lease import Lease
    from gradwire.membership.sealing import WorkerSeal
    from gradwire.membership.types import CheckpointStatus, News

log = logging.getLogger("gradwire.membership")

_POLL_SECONDS = 0.2  # between two polls whether a checkpoint is complete


class WorkerNode:
    """A member of a job: registers at the coordinator, renews its lease once a second, and unregisters at the end.

    - `id`: random if it is None.
    - `endpoint`: the address of your own data plane. The other members receive it unchanged. Without it, `group` gives
      the group of all nodes.
    - `transport`: how that group exchanges data, as in `gw.init`.
    - `secret`: the job's secret or a join token. Unless given here, it comes from `GRADWIRE_TOKEN`.
    - `tls`: the certificates of this process, as `gw.Credentials`. Unless given here, they come from the files that
      `GRADWIRE_TLS_CA`, `GRADWIRE_TLS_CERT` and `GRADWIRE_TLS_KEY` name. A coordinator on another machine needs
      certificates or `insecure=True`.
    - `on_news`: called with each reply to a heartbeat, from another thread.
    - `health`: "host:port" at which this node answers the standard health check; port 0 takes a free port.
    - `logger`: for the node's own log lines.

        with gw.WorkerNode("127.0.0.1:29500", "worker-0", size=2) as node:
            print(node.rank, node.size, node.group.all_reduce(node.rank))
    """

    def __init__(
        self,
        address: str,
        id: str | None = None,
        *,
        endpoint: str = "",
        rank: int | None = None,
        size: int | None = None,
        job: str | None = None,
        timeout: float = 300.0,
        transport: str = "auto",
        secret: bytes | Token | None = None,
        tls: Credentials | None = None,
        insecure: bool = False,
        on_news: Callable[[News], None] | None = None,
        health: str | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self._address, self._wanted_rank, self._size, self._job = address, rank, size, job
        self._timeout = timeout
        if tls is not None and not isinstance(tls, Credentials):
            raise ConfigError(f"the argument tls is {tls!r}: pass gw.Credentials(ca, cert, key)")
        self._credentials = tls or Credentials.from_environ(os.environ)
        loopback = resolve(*split(address))[0].loopback
        if not (loopback or insecure or self._credentials):
            raise ConfigError(
                f"{address} is not a loopback address, and the connection would not be encrypted: pass tls= or "
                "set GRADWIRE_TLS_CA, _CERT and _KEY, or pass insecure=True if you trust the network"
            )
        self._secret = tokens.secret_or_token(os.environ, loopback) if secret is None else secret
        self._on_news, self._log = on_news, logger or log
        self._id = data_links.new_id(self._credentials) if id is None else id
        self._endpoint = endpoint
        config = config_of(address, transport=transport, timeout=timeout, insecure=insecure)
        self._groups = NodeGroup(config, self._secret, self._credentials)
        self._health_wanted, self._insecure = health, insecure
        self._health: HealthServer | None = None
        self._lock = threading.Lock()
        self._assembly: Assembly | None = None
        self._lease: Lease | None = None
        self._seal: WorkerSeal | None = None  # for all registrations
        self._checkpoint_seal: WorkerSeal | None = None  # for all checkpoints, which may run in other threads
        self._started = self._closed = False

    @property
    def id(self) -> str:
        """This member's id, which never changes."""
        return self._id

    @property
    def rank(self) -> int:
        """The rank in the current generation; -1 before `start` and after `close`."""
        return -1 if self._assembly is None else self._assembly.rank

    @property
    def size(self) -> int:
        """The number of members in the current generation; 0 before `start` and after `close`."""
        return 0 if self._assembly is None else len(self._assembly.members)

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0 before `start` and after `close`."""
        return 0 if self._assembly is None else self._assembly.generation

    @property
    def peers(self) -> tuple[Member, ...]:
        """All members of the current generation in rank order, including this one."""
        return () if self._assembly is None else self._assembly.members

    @property
    def group(self) -> Group:
        """The group of the current generation, with all its members in rank order.

        The first use in a generation connects the nodes: it blocks until all of them have asked for their group, for at
        most the node's timeout. When the group is broken, `rejoin` enters the next generation of an elastic job, which
        has a new group.
        """
        return self._groups.connect(self._current())

    @property
    def health_address(self) -> str | None:
        """Where this node answers `grpc.health.v1`; None before `start`, after `close`, and if it was not asked to."""
        return None if self._health is None else self._health.address

    @property
    def news(self) -> News | None:
        """The coordinator's last news: evicted members, the number of joiners, a checkpoint in progress."""
        return None if self._lease is None else self._lease.news

    def start(self) -> Self:
        """Register, wait for the other members, and begin to renew the lease. A node can be started once."""
        with self._lock:
            if self._closed:
                raise Closed(f"the worker node {self.id} is closed")
            if self._started:
                raise ConfigError(f"the worker node {self.id} has already been started")
            self._started = True
        try:
            self._serve_health()
            self._register(0, ())
        except BaseException:
            self._started = False
            self._groups.close()
            self._stop_health()
            raise
        from gradwire.membership.client.worker_lease import Lease

        assembly = self._current()
        self._lease = Lease(
            self._address,
            self.id,
            run=assembly.run,
            secret=self._secret,
            credentials=self._credentials,
            on_news=self._receive,
            lease=assembly.lease,
            logger=self._log,
        )
        self._lease.start()
        return self

    def rejoin(self, lost: Iterable[str] = (), *, waiting: Callable[[str], None] | None = None) -> None:
        """Close the group, wait for the next generation and enter it.

        `lost` are the ids of peers that this worker could not reach. Those that its group could not reach are added.
        """
        generation = self._current().generation
        try:
            self._register(generation, tuple({*lost, *self._groups.unreachable()}), waiting)
        except BaseException:
            self._groups.close()
            raise

    def healthy(self, timeout: float = 1.0) -> bool:
        """Return whether this worker is in the current generation and its coordinator serves (`grpc.health.v1`)."""
        from gradwire.membership.client import requests

        if not self._is_current(self.news):
            return False
        try:
            return requests.serving(self._address, secret=self._secret, timeout=timeout, credentials=self._credentials)
        except GradwireError:
            return False

    def start_checkpoint(self, epoch: int) -> CheckpointStatus:
        """Begin the checkpoint of an epoch for the whole job, or return the progress of one that has begun."""
        from gradwire.membership.client import requests

        self._current()
        return requests.start_checkpoint(
            self._address,
            self.id,
            epoch,
            secret=self._secret,
            credentials=self._credentials,
            seal=self._checkpoint_seal,
        )

    def end_checkpoint(self, epoch: int, timeout: float = 0.0) -> CheckpointStatus:
        """Report that this worker's part is saved, and wait up to `timeout` seconds for all live workers to report.

        After that, raise `Timeout` with the ids of the workers that did not. With timeout 0, return the status at once.
        """
        from gradwire.membership.client import requests

        deadline = time.monotonic() + timeout
        while True:
            self._current()
            status = requests.end_checkpoint(
                self._address,
                self.id,
                epoch,
                secret=self._secret,
                credentials=self._credentials,
                seal=self._checkpoint_seal,
            )
            if status.complete or not timeout:
                return status
            if time.monotonic() >= deadline:
                missing = ", ".join(status.waiting_for)
                raise Timeout(
                    f"the checkpoint of epoch {epoch} was not complete within {timeout:g} s: {missing} did not report",
                    operation="checkpoint",
                    seconds=timeout,
                )
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the group, stop the heartbeats, then unregister at the coordinator if it answers. Idempotent.

        The health check reports from the beginning that this node no longer serves, and ends last.
        """
        if self._health is not None:
            self._health.set(False)
        self._groups.close()
        try:
            self._leave()
        finally:
            self._stop_health()

    def _leave(self) -> None:
        from gradwire.membership.client import requests

        with self._lock:
            self._closed = True
            assembly, self._assembly = self._assembly, None
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        if assembly is None or assembly.members[assembly.rank].pid != os.getpid():
            return
        with contextlib.suppress(GradwireError):
            requests.unregister(
                self._address,
                assembly.members[assembly.rank],
                secret=self._secret,
                run=assembly.run,
                timeout=2.0,
                credentials=self._credentials,
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self) -> Assembly:
        if self._closed:
            raise Closed(f"the worker node {self.id} is closed")
        if self._assembly is None:
            raise ConfigError(f"the worker node {self.id} was not started")
        return self._assembly

    def _register(self, generation: int, lost: tuple[str, ...], waiting: Callable[[str], None] | None = None) -> None:
        from gradwire.membership.client import requests
        from gradwire.membership.sealing import WorkerSeal

        self._seal = self._seal or WorkerSeal(self._secret)
        self._checkpoint_seal = self._checkpoint_seal or WorkerSeal(self._secret)
        rank = None if generation else self._wanted_rank
        self._assembly = requests.register(
            self._address,
            data_links.this_process(self.id, rank, self._endpoint or self._groups.listen()),
            size=None if generation else self._size,
            secret=self._secret,
            job=self._job,
            timeout=self._timeout,
            generation=generation,
            run=self._assembly.run if generation and self._assembly is not None else b"",
            lost=lost,
            credentials=self._credentials,
            waiting=waiting,
            seal=self._seal,
            logger=self._log,
        )
        if self._lease is not None:
            self._lease.enter(self._assembly.run)
        if self._health is not None:
            self._health.set(True)

    def _is_current(self, news: News | None) -> bool:
        """Return whether this node is in the current generation, as far as it knows."""
        if self._assembly is None:
            return False
        return news is None or not (
            self.id in (*news.evicted, *news.unknown) or news.generation > self._assembly.generation
        )

    def _receive(self, news: News) -> None:
        if self._health is not None:
            self._health.set(self._is_current(news))
        if self._on_news is not None:
            self._on_news(news)

    def _serve_health(self) -> None:
        if self._health_wanted is None:
            return
        from gradwire.job.health_server import HealthServer

        self._health = HealthServer(self._health_wanted, self._credentials, insecure=self._insecure)

    def _stop_health(self) -> None:
        health, self._health = self._health, None
        if health is not None:
            health.close()
