"""`gw.launch`: calls a function in n fresh processes and returns the results.

The function is sent by cloudpickle, so lambdas, closures and functions of a script or notebook work, without a module
and without `if __name__ == "__main__"`. It is sent through memory that only the workers inherit, and the results return
through sockets that only the workers hold: nothing is unpickled that came from a network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from gradwire.errors import ConfigError, InvalidSize, WorkerFailed

if TYPE_CHECKING:
    from gradwire.launch.root_cause import Ending
    from gradwire.launch.supervisor import Outcome, Supervisor
    from gradwire.launch.worker_process import Worker

T = TypeVar("T")


def launch(fn: Callable[..., T], n: int, args: Sequence[Any] = ()) -> list[T]:
    """Call `fn(*args)` in each of n fresh processes and return the results by rank.

    In these processes `gw.init()` finds the job; `launch` does not call it. Their output has the rank in front.

    >>> import gradwire as gw
    >>> def total():
    ...     with gw.init() as group:
    ...         return group.all_reduce(group.rank)
    >>> gw.launch(total, 2)
    [1, 1]

    If a rank raises, the others are stopped and its error is raised here; a `WorkerFailed` with the rank's traceback is
    the cause. If a rank ends without an error that can be sent, `WorkerFailed` is raised and names it in `culprit`.
    """
    if isinstance(n, bool) or not hasattr(n, "__index__") or operator.index(n) < 1:
        raise InvalidSize(f"launch needs a number of processes, at least 1, not {n!r}")
    if not callable(fn):
        raise ConfigError(f"launch needs a function, not {fn!r}")
    from gradwire import tracebacks
    from gradwire.launch import rendezvous
    from gradwire.launch.supervisor import Supervisor
    from gradwire.launch.worker_process import Task
    from gradwire.launch.worker_setup import StaticSetup

    tracebacks.install()
    with _payload(fn, tuple(args)) as payload:
        task = Task(("function", str(payload)), inherited=(payload,), returns=True)
        with Supervisor(task, n, StaticSetup(n, rendezvous.on_this_machine(n))) as supervisor:
            supervisor.wait()
    return _results(supervisor)


@contextlib.contextmanager
def _payload(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[int]:
    """Yield a descriptor of an anonymous file with the pickled call, in the form that `worker_main.py` reads."""
    surroundings = {"path": [entry for entry in sys.path if isinstance(entry, str)], "argv": sys.argv}
    fd = os.memfd_create("gradwire-call")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(surroundings).encode() + b"\n")
            _pickle(fn, args, file)
        yield fd
    finally:
        os.close(fd)


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], file: IO[bytes]) -> None:
    import cloudpickle

    with _sent_by_value(fn):
        try:
            cloudpickle.dump((fn, args), file)
        except Exception as error:
            culprit = "the arguments" if _can_be_pickled(fn) else "the function"
            raise ConfigError(f"launch cannot send {culprit} to other processes: {error}") from error


def _can_be_pickled(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _sent_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Pickle the function's module by value if workers cannot import it, as with test files under pytest."""
    import cloudpickle

    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or is_importable(module) or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def is_importable(module: ModuleType) -> bool:
    """Return whether `import` finds the same file in a fresh process with this `sys.path`."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":  # built in, or always pickled by value
        return True
    search: Sequence[str] | None = None
    spec = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), search)
        if spec is None:
            return False
        search = spec.submodule_search_locations or ()
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _find(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module like `importlib.util.find_spec`, but without looking at the modules that are loaded."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None


def _results(supervisor: Supervisor) -> list[Any]:
    outcome = supervisor.outcome
    assert outcome is not None
    if outcome.root is not None:
        raise _failure(supervisor, outcome, outcome.root)
    return [_result(worker) for worker in supervisor.workers]


def _result(worker: Worker) -> Any:
    if worker.result is None:
        raise WorkerFailed(f"rank {worker.number} was stopped before it returned", culprit=worker.number)
    try:
        return pickle.loads(worker.result)
    except Exception as error:
        problem = f"the result of rank {worker.number} cannot be loaded here: {type(error).__name__}: {error}"
        raise WorkerFailed(problem, culprit=worker.number) from error


def _failure(supervisor: Supervisor, outcome: Outcome, root: Ending) -> Exception:
    """Return the exception to raise: the one of the failed rank if it could be sent, with a WorkerFailed as its cause.

    If the root cause is a rank that left too early, the exception is the PeerLost of a rank that needed it.
    """
    from gradwire.launch import root_cause

    raiser = root_cause.find(outcome.endings) if root.left_early else root
    error = _exception(supervisor.workers[raiser.number]) if raiser is not None else None
    explanation = root_cause.explain(root, outcome.last_lines, with_message=error is None or raiser is not root)
    known = WorkerFailed(explanation, culprit=root.number, exit_code=root.exit_code)
    if error is not None:
        error.__cause__ = known
    failure = error or known
    for line in root_cause.consequences([ending for ending in outcome.endings if not ending.stopped], root):
        failure.add_note(line)
    return failure


def _exception(worker: Worker) -> Exception | None:
    """Return the exception of a worker; None if it could not be pickled or unpickled (the report has its text)."""
    if worker.exception is None:
        return None
    with contextlib.suppress(Exception):
        error = pickle.loads(worker.exception)
        if isinstance(error, Exception):
            return error
    return None
