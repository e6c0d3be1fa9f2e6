"""Provides `WorkerNode`: membership without a data plane, for programs that bring their own."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gradwire.errors import Closed, ConfigError, GradwireError, Timeout
from gradwire.host import machine
from gradwire.membership.endpoints import resolve, split
from gradwire.membership.types import Assembly, Member
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.tokens import Token

if TYPE_CHECKING:
    from gradwire.membership.client.worker_lease import Lease
    from gradwire.membership.sealing import WorkerSeal
    from gradwire.membership.types import CheckpointStatus, News

log = logging.getLogger("gradwire.membership")

_POLL_SECONDS = 0.2  # between two polls whether a checkpoint is complete


class WorkerNode:
    """A member of a job: registers at the coordinator, renews its lease once a second, and unregisters at the end.

    `id` is random if it is None. `endpoint` is the address where the other members reach this worker; they receive it
    unchanged. `tls` are the certificates of this process, as `gw.Credentials`. Unless given here, they come from the
    files that `GRADWIRE_TLS_CA`, `GRADWIRE_TLS_CERT` and `GRADWIRE_TLS_KEY` name, and the job's secret (or a join
    token) from `GRADWIRE_TOKEN`. A coordinator on another machine needs certificates or `insecure=True`. `on_news` is
    called about once a second, from another thread.

        with gw.WorkerNode("127.0.0.1:29500", "worker-0", endpoint="10.0.0.5:4711", size=2) as node:
            print(node.rank, node.size, [peer.address for peer in node.peers])
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
        secret: bytes | Token | None = None,
        tls: Credentials | None = None,
        insecure: bool = False,
        on_news: Callable[[News], None] | None = None,
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
        self._on_news = on_news
        self._id = secrets.token_hex(8) if id is None else id
        self._endpoint = endpoint
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
            self._register(0, ())
        except BaseException:
            self._started = False
            raise
        from gradwire.membership.client.worker_lease import Lease

        lease = Lease(
            self._address,
            self.id,
            run=self._current().run,
            secret=self._secret,
            credentials=self._credentials,
            on_news=self._on_news,
        )
        self._lease = lease
        lease.start()
        return self

    def rejoin(self, lost: Iterable[str] = (), *, waiting: Callable[[str], None] | None = None) -> None:
        """Wait for the next generation and enter it. `lost` are the ids of peers that this worker could not reach."""
        self._register(self._current().generation, tuple(lost), waiting)

    def healthy(self, timeout: float = 1.0) -> bool:
        """Return whether this worker is in the current generation and its coordinator serves (`grpc.health.v1`)."""
        from gradwire.membership.client import requests

        if self._assembly is None:
            return False
        news = self.news
        if news is not None and (self.id in (*news.evicted, *news.unknown) or news.generation > self.generation):
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
        """Stop the heartbeats, then unregister at the coordinator if it answers. Idempotent."""
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
        member = Member(
            id=self.id,
            rank=rank,
            host=machine.identity(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            address=self._endpoint,
            started=machine.process_started(),
        )
        self._assembly = requests.register(
            self._address,
            member,
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
        )
        if self._lease is not None:
            self._lease.enter(self._assembly.run)
