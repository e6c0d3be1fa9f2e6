"""Sets up the workers of a job of fixed size on one of several hosts, and ends them together with those elsewhere.

The launchers send each other three kinds of messages: {"failed": true} when a worker has failed, {"stopped": signal}
when a user stops the job, and {"ended": […], "last_lines": […]} when all workers of a node are gone. A launcher ends
when it has the last kind from all others, so that every launcher reports the same root cause.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.errors import GradwireError, TransportError
from gradwire.job import config
from gradwire.job.config import JobConfig
from gradwire.job.stop_notices import STOP_SIGNALS
from gradwire.launch import root_cause, worker_setup
from gradwire.launch.nodes import NodeGroup
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.root_cause import Ending
from gradwire.launch.stop_escalation import STOP_TIMEOUT
from gradwire.launch.worker_setup import Elsewhere, StaticSetup, SupervisorAccess, WorkerEnvironment
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.secret import TOKEN
from gradwire.topology import rank_ranges

if TYPE_CHECKING:
    from gradwire.membership.coordinator.service import Coordinator

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGKILL)
LAST_REPORT_SECONDS = 10.0  # for the last report of another launcher, after its workers must have ended


class NodeSetup(StaticSetup):
    """The setup of the workers of one node. The coordinator of all workers runs on node 0."""

    def __init__(
        self,
        nodes: NodeGroup,
        settings: JobConfig,
        rendezvous: Rendezvous,
        port: int,
        *,
        stop_seconds: float,
        stop_timeout: float = STOP_TIMEOUT,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`port` is for a server that rank 0 of the script starts itself.

        `stop_seconds` is the longest time in which the workers of a node end after a failure, `stop_timeout` the
        longest one after a signal that lets them leave after a whole step.
        """
        super().__init__(nodes.layout.size, rendezvous, environ)
        assert settings.address is not None
        self._nodes = nodes
        self._layout = nodes.layout
        self._address = settings.address
        self._insecure = settings.insecure
        self._port = port
        self._stop_seconds = stop_seconds
        self._stop_timeout = stop_timeout
        self._inbox: collections.deque[tuple[int, Any]] = collections.deque()
        self._last_reports = 0  # nodes whose last report has arrived; used by the thread that receives
        self._supervisor: SupervisorAccess | None = None
        self._endings: dict[int, tuple[Ending, ...]] = {}  # by node, of the nodes whose workers are gone
        self._last_lines: dict[int, Sequence[str]] = {}
        self._lost: GradwireError | None = None
        self._deadline: float | None = None  # after which other launchers are not waited for
        self._told_failure = self._told_stop = self._gone = False

    @property
    def welcome(self) -> str:
        """One line about the job and this node's part in it."""
        layout = self._layout
        ranks = rank_ranges(range(layout.first_rank, layout.first_rank + layout.local_size))
        here = f"ranks {ranks}" if layout.local_size > 1 else f"rank {ranks}"
        return (
            f"job {self._rendezvous.job}: {layout.size} ranks on {len(layout.hosts)} nodes; "
            f"node {layout.node} has {here}"
        )

    # -- hooks of the supervisor --------------------------------------------------------------------------------------

    def start(self, supervisor: SupervisorAccess) -> None:
        self._supervisor = supervisor
        supervisor.print_line(f"gradwire: {self.welcome}")
        layout = self._layout
        self._shared = {
            **worker_setup.shared_by_workers(
                self._environ,
                layout.size,
                coordinator=self._rendezvous.coordinator.address,
                job=self._rendezvous.job,
                token=self._rendezvous.token,
                port=self._port,
                host=self._address.host,
                local_size=layout.local_size,
            ),
            **({config.INSECURE: "1"} if self._insecure else {}),
            worker_setup.GROUP_RANK: str(layout.node),
            worker_setup.GROUP_SIZE: str(len(layout.hosts)),
        }
        self._nodes.start(self._receive)

    def number_of(self, index: int) -> int:
        return self._layout.first_rank + index

    def environment_of(self, number: int, local_rank: int) -> WorkerEnvironment:
        return WorkerEnvironment(worker_setup.of_worker(self._shared, number, local_rank))

    def failing(self) -> None:
        self._limit_waiting()
        if not self._told_failure:
            self._told_failure = True
            self._nodes.send({"failed": True})

    def stopping(self, number: int) -> None:
        self._limit_waiting(max(self._stop_timeout, self._stop_seconds) if number in STOP_SIGNALS else None)
        if not self._told_stop:
            self._told_stop = True
            self._nodes.send({"stopped": int(number)})

    def workers_gone(self, endings: Sequence[Ending], last_lines: Callable[[Ending | None], Sequence[str]]) -> None:
        self._gone = True
        lines = list(last_lines(root_cause.find(endings)))
        now = time.monotonic()
        self._nodes.send({"ended": [root_cause.to_message(ending, now) for ending in endings], "last_lines": lines})

    @property
    def concluded(self) -> bool:
        if self._lost is not None or len(self._endings) == len(self._layout.hosts) - 1:
            return True
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def next_due(self) -> float | None:
        return self._deadline if self._gone else None

    @property
    def elsewhere(self) -> Elsewhere:
        endings = tuple(ending for node in sorted(self._endings) for ending in self._endings[node])
        return Elsewhere(endings, self._last_lines, self._lost)

    def update(self, now: float) -> None:
        while self._inbox:
            self._handle(*self._inbox.popleft(), now)

    def close(self) -> None:
        self._nodes.close()
        super().close()

    # -- messages of other launchers ----------------------------------------------------------------------------------

    def _receive(self, node: int, message: Any) -> bool:
        """Queue a message; the thread of the launchers' group calls this."""
        self._inbox.append((node, message))
        assert self._supervisor is not None
        self._supervisor.wake()
        self._last_reports += isinstance(message, dict) and "ended" in message
        return self._last_reports < len(self._layout.hosts) - 1

    def _handle(self, node: int, message: Any, now: float) -> None:
        assert self._supervisor is not None
        match message:
            case {"failed": True}:
                self._told_failure = True
                self._limit_waiting()
                self._supervisor.end_after_failure()
            case {"stopped": int(number)} if number in _STOP_SIGNALS:
                self._told_stop = True
                self._supervisor.print_line(f"gradwire: the launcher of {self._name(node)} was stopped")
                self._supervisor.stop(number)
            case {"ended": list(endings), "last_lines": list(lines)}:
                self._ended(node, endings, lines, now)
            case _:
                self._lose(self._nodes.problem or TransportError(f"{self._name(node)} sent a malformed message"))

    def _ended(self, node: int, endings: list[Any], lines: list[Any], now: float) -> None:
        try:
            parsed = tuple(root_cause.from_message(one, self._layout.hosts[node], now) for one in endings)
        except ValueError:
            self._lose(TransportError(f"{self._name(node)} sent a malformed message"))
            return
        self._endings[node] = parsed
        root = root_cause.find(parsed)
        if root is not None:
            self._last_lines[root.number] = [str(line) for line in lines]
            self._told_failure = True
            self._limit_waiting()
            assert self._supervisor is not None
            self._supervisor.end_after_failure()

    def _lose(self, problem: GradwireError) -> None:
        self._lost = problem
        assert self._supervisor is not None
        self._supervisor.print_line(f"gradwire: {problem}; this launcher ends its workers")
        self._supervisor.end_after_failure()

    def _limit_waiting(self, seconds: float | None = None) -> None:
        if self._deadline is None:
            seconds = self._stop_seconds if seconds is None else seconds
            self._deadline = time.monotonic() + seconds + LAST_REPORT_SECONDS

    def _name(self, node: int) -> str:
        return f"node {node} (host {self._layout.hosts[node]})"


class _Remote:
    """The coordinator that node 0 runs, as the other nodes see it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def node_setup(
    nodes: NodeGroup,
    settings: JobConfig,
    environ: Mapping[str, str],
    *,
    stop_seconds: float,
    stop_timeout: float = STOP_TIMEOUT,
) -> NodeSetup:
    """Return the setup of this node's workers. Node 0 starts their coordinator, and the others learn where it is."""
    assert settings.address is not None
    serving, terms = None, None
    try:
        if nodes.layout.node == 0:
            serving = _coordinator(settings, nodes.layout.size, environ)
            port = worker_setup.free_port(settings.address.resolve()[0])
            terms = {"coordinator": serving.address, "job": serving.job, "port": port}
        match nodes.broadcast(terms):
            case {"coordinator": str(address), "job": str(job), "port": int(port)}:
                rendezvous = Rendezvous(serving or _Remote(address), job, environ.get(TOKEN))
                limits = {"stop_seconds": stop_seconds, "stop_timeout": stop_timeout}
                return NodeSetup(nodes, settings, rendezvous, port, environ=environ, **limits)
        raise TransportError("node 0 runs another version of gradwire: install the same one on all nodes")
    except BaseException as error:
        nodes.abort(f"the launcher of node {nodes.layout.node} failed: {error}")
        if serving is not None:
            serving.stop()
        raise


def _coordinator(settings: JobConfig, size: int, environ: Mapping[str, str]) -> Coordinator:
    from gradwire.membership.coordinator.service import Coordinator  # loads grpc

    assert settings.address is not None
    coordinator = Coordinator(
        settings.address.host,
        0,
        size=size,
        secret=tokens.whole_secret(environ, settings.address.is_loopback()),
        job=settings.job,
        insecure=settings.insecure,
        credentials=Credentials.from_environ(environ),
    )
    coordinator.start()
    return coordinator
