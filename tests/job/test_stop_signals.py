"""Signals that stop a job: which are recorded, which have their default effect, and what the launcher learns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from signal import SIGTERM, SIGUSR2

import pytest

from gradwire.job import stop_signals
from gradwire.job.stop_notices import NOTICES, NoticeKind, NoticeReader, NoticeWriter, StopNotice
from gradwire.job.stop_signals import SECOND_AFTER, StopSignals


@pytest.fixture(name="reader")
def reader_fixture() -> Iterator[NoticeReader]:
    reader = NoticeReader()
    yield reader
    reader.close()


def statuses(code: str) -> int:
    """Run code in a fresh process; return its exit code, or minus the signal that ended it."""
    head = "import os, signal, sys\nfrom gradwire.job import stop_signals\n"
    return subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], check=False, timeout=60).returncode


# -- decisions --------------------------------------------------------------------------------------------------------


def test_signals_first_one_is_recorded_and_later_ones_are_not() -> None:
    signals = StopSignals(lambda: True)
    assert signals.received == 0
    assert signals.accept(SIGUSR2, now=100)
    assert signals.accept(SIGTERM, now=200)
    assert signals.accept(SIGUSR2, now=300)
    assert signals.received == SIGUSR2


def test_signals_second_sigterm_has_the_default_effect_unless_it_is_a_duplicate() -> None:
    signals = StopSignals(lambda: True)
    assert signals.accept(SIGTERM, now=100)
    assert signals.accept(SIGTERM, now=100 + SECOND_AFTER / 2)
    assert not signals.accept(SIGTERM, now=100 + SECOND_AFTER)


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_signals_of_a_run_that_cannot_stop_have_the_default_effect(number: int) -> None:
    signals = StopSignals(lambda: False)
    assert not signals.accept(number, now=100)
    assert signals.received == 0


def test_signals_are_reported_once_and_agreement_always(reader: NoticeReader) -> None:
    signals = StopSignals(lambda: True, NoticeWriter({NOTICES: reader.variable}))
    signals.accept(SIGUSR2, now=100)
    signals.accept(SIGTERM, now=101)
    signals.agreed(SIGTERM)
    assert reader.receive() == [StopNotice(NoticeKind.RECEIVED, SIGUSR2), StopNotice(NoticeKind.AGREED, SIGTERM)]


# -- the pipe ---------------------------------------------------------------------------------------------------------


def test_notices_without_a_launcher_or_with_a_foreign_descriptor_are_not_written(reader: NoticeReader) -> None:
    inode = os.fstat(reader.write_end).st_ino
    for text in ("", "1", f"{reader.write_end}:{inode + 1}", f"999999:{inode}", "x:y"):
        NoticeWriter({NOTICES: text}).send(NoticeKind.RECEIVED, SIGTERM)
    assert reader.receive() == []


def test_notices_after_the_program_closed_the_descriptor_are_dropped(reader: NoticeReader) -> None:
    writer = NoticeWriter({NOTICES: reader.variable})
    reader.close_write_end()
    writer.send(NoticeKind.RECEIVED, SIGTERM)
    assert reader.receive() == []
    assert reader.ended


def test_notices_of_a_full_pipe_are_dropped_without_waiting(reader: NoticeReader) -> None:
    writer = NoticeWriter({NOTICES: reader.variable})
    with pytest.raises(BlockingIOError):
        while True:
            os.write(reader.write_end, b"R\x0f")
    writer.send(NoticeKind.RECEIVED, SIGUSR2)
    assert set(reader.receive()) == {StopNotice(NoticeKind.RECEIVED, SIGTERM)}


def test_notices_of_foreign_bytes_end_the_reading(reader: NoticeReader) -> None:
    os.write(reader.write_end, b"R")
    assert reader.receive() == []
    os.write(reader.write_end, b"\x0fhello")
    assert reader.receive() == [StopNotice(NoticeKind.RECEIVED, SIGTERM)]
    assert reader.ended


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_watched_records_a_signal_and_sets_the_default_handler_afterwards(number: int) -> None:
    code = f"""
        with stop_signals.watched() as signals:
            os.kill(os.getpid(), {number})
            assert signals.received == {number}
        assert signal.getsignal({number}) == signal.SIG_DFL
        os.kill(os.getpid(), {number})
    """
    assert statuses(code) == -number


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_watched_run_that_cannot_stop_is_ended_by_a_signal(number: int) -> None:
    assert statuses(f"with stop_signals.watched(lambda: False): os.kill(os.getpid(), {number})") == -number


def test_watched_second_sigterm_ends_the_process() -> None:
    code = """
        stop_signals.SECOND_AFTER = 0.0
        with stop_signals.watched() as signals:
            os.kill(os.getpid(), 15)
            os.kill(os.getpid(), 15)
    """
    assert statuses(code) == -SIGTERM


def test_watched_handler_of_the_program_is_left_alone() -> None:
    code = """
        calls = []
        signal.signal(15, lambda number, frame: calls.append(number))
        with stop_signals.watched() as signals:
            os.kill(os.getpid(), 15)
            assert (calls, signals.received) == ([15], 0)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.kill(os.getpid(), 15)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert calls == [15, 15]
    """
    assert statuses(code) == 0


def test_watched_in_a_thread_installs_nothing() -> None:
    handlers = []

    def watch() -> None:
        with stop_signals.watched() as signals:
            handlers.append((signal.getsignal(SIGTERM), signals.received))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert handlers == [(signal.getsignal(SIGTERM), 0)]


def test_watched_nested_runs_and_runs_in_sequence_see_a_signal_that_was_not_acted_upon() -> None:
    code = """
        with stop_signals.watched(lambda: False) as outer:
            with stop_signals.watched() as inner:
                os.kill(os.getpid(), 15)
                assert (inner.received, outer.received) == (15, 0)
            assert outer.received == 15
        with stop_signals.watched() as later:
            assert later.received == 15
            later.agreed(15)
            assert later.received == 15
        with stop_signals.watched() as last:
            assert last.received == 0
            os.kill(os.getpid(), signal.SIGUSR2)
            assert last.received == signal.SIGUSR2
    """
    assert statuses(code) == 0


def test_watched_left_in_another_thread_has_the_default_effect() -> None:
    code = """
        import threading
        watch = stop_signals.watched()
        watch.__enter__()
        thread = threading.Thread(target=watch.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        os.kill(os.getpid(), 15)
    """
    assert statuses(code) == -SIGTERM


@pytest.mark.parametrize(("number", "status"), [(SIGTERM, -SIGTERM), (SIGUSR2, 0)])
def test_watched_forked_child_is_ended_by_sigterm_only_and_sends_no_notice(
    number: int, status: int, reader: NoticeReader
) -> None:
    code = f"""
        os.environ["{NOTICES}"] = sys.argv[1]
        with stop_signals.watched() as signals:
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), {number})
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == {status}
            assert signals.received == 0
            if (child := os.fork()) == 0:
                signals.agreed({number})
                os._exit(0)
            os.waitpid(child, 0)
    """
    head = "import os, signal, sys\nfrom gradwire.job import stop_signals\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), reader.variable]
    assert subprocess.run(command, check=False, timeout=60, pass_fds=[reader.write_end]).returncode == 0
    assert [notice.kind for notice in reader.receive()] == [NoticeKind.WATCHING, NoticeKind.NOT_WATCHING]


def notices_of(code: str, reader: NoticeReader) -> list[tuple[NoticeKind, int]]:
    """Run code in a fresh process with a launcher; return the notices that it sends."""
    head = "import os, signal, sys\nfrom gradwire.job import stop_signals\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code)]
    environ = {**os.environ, NOTICES: reader.variable}
    assert subprocess.run(command, check=False, timeout=60, pass_fds=[reader.write_end], env=environ).returncode == 0
    return [(notice.kind, notice.number) for notice in reader.receive()]


def test_watched_reports_how_signals_are_treated(reader: NoticeReader) -> None:
    code = """
        with stop_signals.watched():
            os.kill(os.getpid(), 15)
        with stop_signals.watched() as signals:
            signals.agreed(15)
    """
    assert notices_of(code, reader) == [
        (NoticeKind.WATCHING, 0),
        (NoticeKind.RECEIVED, SIGTERM),
        (NoticeKind.NOT_WATCHING, 0),
        (NoticeKind.WATCHING, 0),
        (NoticeKind.RECEIVED, SIGTERM),
        (NoticeKind.AGREED, SIGTERM),
    ]


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_watched_signal_does_not_disturb_the_exit_of_a_process_that_leaves(number: int) -> None:
    code = f"""
        with stop_signals.watched(lambda: not stopped) as signals:
            stopped = False
            signals.agreed(12)
            stopped = True  # the run is over: it could not leave after another step
        os.kill(os.getpid(), {number})
        sys.exit(140)
    """
    assert statuses(code) == 140


def test_watched_second_sigterm_ends_a_process_that_leaves() -> None:
    code = """
        stop_signals.SECOND_AFTER = 0.0
        with stop_signals.watched() as signals:
            os.kill(os.getpid(), 15)
            signals.agreed(15)
        os.kill(os.getpid(), 15)
    """
    assert statuses(code) == -SIGTERM


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_watched_forked_child_can_leave_the_block_and_watch_itself(number: int) -> None:
    code = f"""
        with stop_signals.watched() as signals:
            child = os.fork()
            if child == 0:
                with stop_signals.watched() as own:
                    os.kill(os.getpid(), {number})
                    assert own.received == {number}
        if child == 0:
            os._exit(7)
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    assert statuses(code) == 7
