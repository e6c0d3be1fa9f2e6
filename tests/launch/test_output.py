"""The output of workers on a screen and in log files."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.errors import TransportError
from gradwire.launch.output import Output
from gradwire.launch.screen import ERR, OUT, Screen
from support.launch_jobs import LONG


class Terminal(io.StringIO):
    """Remembers everything, and can replay what a terminal would show at the end."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        lines = [""]
        for token in re.findall(r"\x1b\[2K|\x1b\[[0-9;]*m|.|\n|\r", self.getvalue()):
            if token == "\n":
                lines.append("")
            elif token == "\x1b[2K":
                lines[-1] = ""
            elif token != "\r" and not token.startswith("\x1b"):
                lines[-1] += token
        return lines


class Narrow(io.TextIOWrapper):
    """Can only write ASCII."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="ascii")


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)


def printed(
    *pieces: tuple[int, int, bytes],
    size: int = 2,
    clock: Callable[[], float] = lambda: 0.0,
    log_dir: Path | None = None,
) -> tuple[str, str]:
    """What is shown on both streams when ranks print these pieces: (rank, stream, bytes)."""
    out, err = io.StringIO(), io.StringIO()
    output = Output(out=out, err=err, clock=clock, log_dir=log_dir)
    for rank in range(size):
        with output.pipes(str(rank), f"rank-{rank}.log") as pipes:
            for its_rank, stream, data in pieces:
                if its_rank == rank:
                    os.write(pipes[stream], data)
    output.start()
    assert output.close(LONG)
    return out.getvalue(), err.getvalue()


def test_output_line_has_its_rank_in_front_and_keeps_its_stream() -> None:
    out, err = printed((0, OUT, b"a\nb\n"), (1, OUT, b"c\n"), (1, ERR, b"d\n"))
    assert sorted(out.splitlines()) == ["[0] a", "[0] b", "[1] c"]
    assert err == "[1] d\n"


def test_output_missing_newline_at_the_end_is_added() -> None:
    assert printed((0, OUT, b"no end"))[0] == "[0] no end\n"


def test_output_progress_bar_in_a_file_is_thinned_out() -> None:
    times = iter([0.0, 0.0, 1.0, 2.0, 6.0, 6.0, 7.0])
    out = io.StringIO()
    output = Output(out=out, err=io.StringIO(), clock=lambda: next(times))
    with output.pipes("0", "rank-0.log") as (pipe, *_):
        output.start()
        for percent in (b"0%\r", b"1%\r", b"2%\r", b"3%\r", b"4%\r"):
            os.write(pipe, percent)
            _until_read(pipe)
        os.write(pipe, b"100%\n")
    assert output.close(LONG)
    assert out.getvalue().splitlines() == ["[0] 0%", "[0] 3%", "[0] 100%"]


def _until_read(pipe: int) -> None:
    """Wait until the reader has emptied the pipe, so that it reads the next piece separately."""
    import fcntl
    import struct
    import termios

    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]:
        os.sched_yield()


def test_output_log_has_the_bytes_of_the_rank(tmp_path: Path) -> None:
    data = b"10%\r20%\r\n\xff\x00 no end"
    printed((1, OUT, data), (0, ERR, b"error\n"), log_dir=tmp_path / "new" / "logs")
    assert (tmp_path / "new" / "logs" / "rank-1.log").read_bytes() == data
    assert (tmp_path / "new" / "logs" / "rank-0.log").read_bytes() == b"error\n"


def test_output_log_that_cannot_be_opened_raises_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransportError, match="cannot write logs in"):
        Output(log_dir=tmp_path / "file")


def test_output_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    err = io.StringIO()
    output = Output(out=io.StringIO(), err=err, log_dir=tmp_path)
    (tmp_path / "full.log").symlink_to("/dev/full")
    with output.pipes("0", "full.log") as (_, pipe, _):
        os.write(pipe, b"one\n")
    output.start()
    assert output.close(LONG)
    assert err.getvalue() == "[0] (gradwire: this log ends here: No space left on device)\n[0] one\n"


def test_output_of_a_later_worker_with_the_same_log_is_appended(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out=out, err=err, log_dir=tmp_path)
    output.start()
    for life in (b"first\n", b"second\n"):
        with output.pipes("coordinator", "coordinator.log") as (pipe, *_):
            os.write(pipe, life)
            _until_read(pipe)
    output.print_line("a word of our own")
    assert output.close(LONG)
    assert out.getvalue() == "[coordinator] first\n[coordinator] second\n"
    assert err.getvalue() == "a word of our own\n"
    assert (tmp_path / "coordinator.log").read_text() == "first\nsecond\n"


def test_output_tracebacks_are_logged_and_kept_but_not_shown(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out=out, err=err, log_dir=tmp_path)
    with output.pipes("0", "rank-0.log") as pipes:
        os.write(pipes.tracebacks, b"Traceback\nValueError: boom\n")
    output.start()
    assert output.close(LONG)
    assert out.getvalue() + err.getvalue() == ""
    assert (tmp_path / "rank-0.log").read_text() == "Traceback\nValueError: boom\n"
    assert output.tail("0") == ["Traceback", "ValueError: boom"]


def test_output_message_of_the_launcher_keeps_the_unfinished_line_at_the_bottom() -> None:
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    screen.show("0", OUT, [], "10%")
    screen.print_line("hello")
    assert terminal.shown() == ["hello", "[0] 10%"]


def test_output_tail_returns_the_last_lines() -> None:
    output = Output(out=io.StringIO(), err=io.StringIO())
    with output.pipes("0", "rank-0.log") as (pipe, *_):
        os.write(pipe, b"".join(b"%d\n" % number for number in range(100)) + b"end")
    output.start()
    assert output.close(LONG)
    assert output.tail("0") == [*map(str, range(81, 100)), "end"]


def test_output_pipe_that_outlives_the_workers_does_not_delay_the_end() -> None:
    output = Output(out=io.StringIO(), err=io.StringIO())
    with output.pipes("0", "rank-0.log") as (pipe, *_):
        escaped = os.dup(pipe)
    output.start()
    try:
        deadline = time.monotonic() + LONG
        while not output.close(timeout=0.01):  # asking often must not count as news
            assert time.monotonic() < deadline
    finally:
        os.close(escaped)


def test_output_screen_that_stands_still_delays_only_the_printing() -> None:
    reading, writing = os.pipe()
    read: list[bytes] = []

    def write(pipe: int) -> None:
        with open(pipe, "wb") as file:
            file.write(b"x\n" * 200_000)

    def move_again() -> None:
        while chunk := os.read(reading, 1 << 16):
            read.append(chunk)

    reader = threading.Thread(target=move_again, daemon=True)
    with open(writing, "w") as paused:
        output = Output(out=paused, err=io.StringIO())
        with output.pipes("0", "rank-0.log") as (pipe, *_):
            writer = threading.Thread(target=write, args=(os.dup(pipe),), daemon=True)
            output.start()
            writer.start()
        assert not output.close(timeout=0.05)
        reader.start()
        writer.join(LONG)
        assert output.close(LONG)
    reader.join(LONG)
    os.close(reading)
    assert b"".join(read) == b"[0] x\n" * 200_000


def test_output_screen_that_is_gone_is_given_up() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    err = io.StringIO()
    gone = open(writing, "w")  # noqa: SIM115
    screen = Screen(gone, err)
    screen.show("0", OUT, ["one"])
    screen.show("0", OUT, ["two"])
    screen.show("0", ERR, ["three"])
    assert err.getvalue() == "[0] three\n"
    gone.close()  # without an error, as when the interpreter ends: nothing is left in its buffer


def test_output_terminal_that_is_gone_does_not_keep_the_job_from_ending() -> None:
    terminal, screen = pty.openpty()
    with open(screen, "w", buffering=1) as gone:
        output = Output(out=gone, err=gone)
        os.close(terminal)
        with output.pipes("0", "rank-0.log") as (pipe, *_):
            os.write(pipe, b"to nobody\n")
        output.start()
        assert output.close(LONG)
        assert output.tail("0") == ["to nobody"]


def test_output_screen_without_unicode_shows_escapes() -> None:
    narrow = Narrow()
    Screen(narrow, io.StringIO()).show("0", OUT, ["grüße"])
    assert narrow.bytes.getvalue() == b"[0] gr\\xfc\\xdfe\n"


def test_output_prefixes_have_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    screen = Screen(terminal, file)
    screen.show("0", OUT, ["a"])
    screen.show("0", ERR, ["a"])
    assert "\x1b[36m" in terminal.getvalue()
    assert terminal.shown() == ["[0] a", ""]
    assert file.getvalue() == "[0] a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Screen(plain, file).show("0", OUT, ["a"])
    assert plain.getvalue() == "[0] a\n"


def test_output_colour_ends_with_its_line() -> None:
    terminal = Terminal()
    Screen(terminal, terminal).show("0", OUT, ["\x1b[31mred"])
    assert terminal.getvalue().endswith("\x1b[31mred\x1b[0m\n")


def test_output_on_a_terminal_keeps_the_unfinished_line_at_the_bottom() -> None:
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    screen.show("0", ERR, [], "10%")
    assert terminal.shown() == ["[0] 10%"]
    screen.show("1", OUT, ["hello"])
    assert terminal.shown() == ["[1] hello", "[0] 10%"]
    screen.show("0", ERR, [], "20%")
    assert terminal.shown() == ["[1] hello", "[0] 20%"]
    screen.show("1", OUT, [], "x" * 100)
    assert terminal.shown() == ["[1] hello", "[1] " + "x" * 24 + "…"]
    screen.show("1", OUT, ["y"])
    assert terminal.shown() == ["[1] hello", "[1] y", ""]
