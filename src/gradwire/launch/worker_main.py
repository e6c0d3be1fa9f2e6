"""The first code in a worker process: waits for the start signal, runs the task, reports its end to the supervisor.

    python worker_main.py CHANNEL TRACEBACKS script PATH ARGS…     as `python PATH ARGS…` would
    python worker_main.py CHANNEL TRACEBACKS module NAME ARGS…     as `python -m NAME ARGS…` would
    python worker_main.py CHANNEL TRACEBACKS function PAYLOAD      calls a pickled function and sends the result back

CHANNEL, TRACEBACKS and PAYLOAD are inherited file descriptors. This file is started by its path and imports almost
nothing, so the script finds only those modules loaded that plain Python would have loaded. The script can therefore
still set variables before it imports NumPy.

On the channel each message is a kind (one byte), a length (eight bytes) and that many bytes:
E a report of the uncaught exception (JSON) · X that exception, pickled · R the result, pickled.

An uncaught exception that was reported is printed by the launcher, once for all workers that raised it. Its full
traceback goes to TRACEBACKS, which leads to the worker's log file. Without a launcher that takes the report, or with
a `sys.excepthook` of the script's own, the exception is printed to standard error as usual.
"""

from __future__ import annotations

import builtins
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, TracebackType
    from typing import Any, NoReturn

REPORT, EXCEPTION, RESULT = b"E", b"X", b"R"
FINISHED = "gradwire.errors.Finished"  # a worker that starts after the work is done has not failed
HEADER_SIZE = 9


class Untransferable(Exception):
    """The call could not be unpickled here, or its result not be pickled."""


class OwnDescriptor:
    """An inherited file descriptor that only this process uses: processes that it forks close their copy."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()
        self._inode = os.fstat(fd).st_ino
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=self._close)

    def write(self, data: bytes) -> bool:
        """Write all bytes. Return False in a forked child, and if the program has closed the descriptor."""
        if os.getpid() != self._owner or not self._is_open():
            return False
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        return True

    def _is_open(self) -> bool:
        """Some programs close all descriptors, and the number can then belong to a file of theirs."""
        try:
            return os.fstat(self._fd).st_ino == self._inode
        except OSError:
            return False

    def _close(self) -> None:
        if self._is_open():
            os.close(self._fd)


class Channel(OwnDescriptor):
    """The worker's end of the socket to the supervisor."""

    def wait_for_start(self) -> None:
        """Wait until the supervisor's guard watches this process; exit if the supervisor is gone."""
        if not os.read(self._fd, 1):
            os._exit(1)

    def send(self, kind: bytes, body: bytes) -> bool:
        """Send a message; False if there is no supervisor to receive it."""
        return self.write(kind + len(body).to_bytes(HEADER_SIZE - 1, "big")) and self.write(body)


def main() -> None:
    channel_fd, tracebacks_fd, kind, *rest = sys.argv[1:]
    channel, tracebacks = Channel(int(channel_fd)), OwnDescriptor(int(tracebacks_fd))
    channel.wait_for_start()
    try:
        if kind == "function":
            _run_function(channel, int(rest[0]))
        elif kind == "module":
            _run_module(*rest)
        else:
            _run_script(*rest)
    except BaseException as error:
        reported = False
        try:
            reported = _report(channel, error, whole=kind == "function")
        except Exception as problem:  # no memory or no supervisor: the error must be printed all the same
            print(f"gradwire: the next error could not be reported to the supervisor: {problem!r}", file=sys.stderr)
        if _name(type(error)) == FINISHED:
            print(f"gradwire: {_text(error)}", file=sys.stderr)
            sys.exit(0)
        _set_excepthook(tracebacks if reported else None)
        raise  # Python ends the process as usual: hook, exit code, signal


def _run_script(path: str, *args: str) -> None:
    from importlib.machinery import SourceFileLoader

    sys.argv = [path, *args]
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    file = os.path.abspath(path)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    _run(code, __file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))


def _run_module(name: str, *args: str) -> None:
    sys.argv = ["-m", *args]
    _first_on_path(os.getcwd())
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
        if spec is None:
            _give_up(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed")
    if spec is None:
        _give_up(f"No module named {name}")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        _give_up(f"No code object available for {name}")
    sys.argv[0] = spec.origin or name
    _run(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _find(name: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(f"{error.name}."):  # a parent package is missing
            _give_up(f"Error while finding module specification for {name!r} (ModuleNotFoundError: {error})")
        raise  # an import inside a parent package has failed, and its traceback shows where


def _give_up(reason: str) -> NoReturn:
    sys.exit(f"{sys.executable}: {reason}")


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder  # replaces the folder of this file, which Python has put there


def _run(code: CodeType, **attributes: Any) -> None:
    main_module = type(sys)("__main__")
    main_module.__dict__.update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _run_function(channel: Channel, payload: int) -> None:
    sys.modules["__main__"] = type(sys)("__main__")  # empty: there is no script
    sys.excepthook = lambda kind, error, trace: None  # the caller of `gw.launch` gets the error
    function, args = _unpacked(payload)
    channel.send(RESULT, _packed(function(*args)))


def _unpacked(payload: int) -> Any:
    import json
    import mmap
    import pickle

    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as call:
        os.close(payload)
        header = call.readline()
        surroundings = json.loads(header)
        sys.path[:] = surroundings["path"]
        sys.argv[:] = surroundings["argv"]
        with memoryview(call) as view, view[len(header) :] as pickled:
            try:
                return pickle.loads(pickled)
            except Exception as error:
                raise Untransferable(f"the function or its arguments cannot be loaded: {_summary(error)}") from error


def _packed(result: object) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise Untransferable(f"the result cannot be sent back: {_summary(error)}") from None


def _report(channel: Channel, error: BaseException, *, whole: bool) -> bool:
    """Send what the supervisor needs to know of an uncaught exception; `whole`: and the exception itself."""
    import json
    import time

    broken = _broken(error)
    culprit = getattr(broken, "culprit", None)
    report = {
        "time": time.monotonic(),
        "type": _name(type(error)),
        "message": _text(error),
        "traceback": _traceback(error),
        "place": _place(error),
        "broken": broken is not None,
        "lost": broken is not None and _has_base(broken, "PeerLost"),
        "culprit": culprit if isinstance(culprit, int) else None,
    }
    sent = channel.send(REPORT, json.dumps(report).encode())
    if whole and isinstance(error, Exception) and not isinstance(error, Untransferable):
        import cloudpickle

        channel.send(EXCEPTION, cloudpickle.dumps(error))
    return sent


def _broken(error: BaseException) -> BaseException | None:
    """Return the error of a broken group that an error is, holds or was caused by.

    It is found by the name of its class, because gradwire may not be loaded.
    """
    found: list[BaseException | None] = [error]
    seen = set()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if _has_base(one, "Broken"):
            return one
        found += [one.__context__, one.__cause__, *getattr(one, "exceptions", ())]
    return None


def _has_base(error: BaseException, name: str) -> bool:
    return any((kind.__module__, kind.__qualname__) == ("gradwire.errors", name) for kind in type(error).__mro__)


def _name(kind: type[BaseException]) -> str:
    plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(str() of this error failed)"


def _summary(error: BaseException) -> str:
    return f"{_name(type(error))}: {_text(error)}"


def _traceback(error: BaseException) -> str:
    """The traceback for people: without frames of this file, and without frames inside gradwire if it is loaded."""
    error.__traceback__ = _own_part_cut(error.__traceback__)
    if "gradwire" in sys.modules:
        try:
            from gradwire.tracebacks import format_exception

            return format_exception(error)
        except ImportError:  # gradwire is loaded in part: its own import has failed
            pass
    return _full_traceback(error)


def _full_traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _place(error: BaseException) -> str:
    """Return the line of the script that raised or called what raised, for errors that are shown in one line."""
    trace = _own_part_cut(error.__traceback__)
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""


def _own_part_cut(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _set_excepthook(tracebacks: OwnDescriptor | None) -> None:
    """Hide the frames of this file. With `tracebacks`, print there what nothing but the default hook would print."""
    hook = sys.excepthook
    default = hook is sys.__excepthook__ or getattr(hook, "__module__", "") == "gradwire.tracebacks"

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = _own_part_cut(error.__traceback__)
        if default and tracebacks is not None and tracebacks.write(_full_traceback(error).encode(errors="replace")):
            return
        hook(kind, error, error.__traceback__)

    sys.excepthook = show


if __name__ == "__main__":
    main()
