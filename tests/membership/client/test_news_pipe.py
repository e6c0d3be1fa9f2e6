"""Tests of the pipe that carries news from a launcher to its worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gradwire.membership.client.news_pipe import NEWS, NewsReader, NewsWriter
from gradwire.membership.types import News


def news(generation: int, joiners: int = 0, evicted: tuple[str, ...] = (), checkpoint: int | None = None) -> News:
    return News(generation, joiners, evicted, checkpoint)


@pytest.fixture
def ends() -> Iterator[tuple[NewsWriter, NewsReader]]:
    writer = NewsWriter("box/1")
    read_end = os.dup(writer.read_end)  # one process has both ends here
    reader = NewsReader.from_environ({NEWS: f"{read_end}:{os.fstat(read_end).st_ino}"})
    assert reader is not None
    writer.close_read_end()
    yield writer, reader
    writer.close()
    reader.close()


def test_latest_returns_the_last_news(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    assert reader.latest() is None
    writer.send(news(1, 0))
    writer.send(news(2, joiners=1, evicted=("box/0",), checkpoint=7))
    assert reader.latest() == news(2, joiners=1, evicted=(), checkpoint=7)
    assert reader.latest() == news(2, joiners=1, evicted=(), checkpoint=7)
    writer.send(news(3, 0, evicted=("box/0", "box/1")))
    assert reader.latest() == news(3, 0, evicted=("box/1",))


def test_cuts_last_until_heal(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    assert reader.cuts() == frozenset()
    writer.cut("box/2")
    writer.cut("box/3")
    assert reader.cuts() == {"box/2", "box/3"}
    writer.heal("box/2")
    assert reader.cuts() == {"box/3"}
    assert reader.latest() is None


def test_writer_with_a_reader_that_does_not_read_never_blocks_and_keeps_the_newest(
    ends: tuple[NewsWriter, NewsReader],
) -> None:
    writer, reader = ends
    for generation in range(5000):
        writer.send(news(generation, 0))
    writer.cut("box/2")
    assert reader.latest() != news(4999, 0)  # the pipe was full
    writer.flush()
    assert reader.latest() == news(4999, 0)
    assert reader.cuts() == {"box/2"}


def test_writer_repeated_news_is_written_once(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    for _ in range(3):
        writer.send(news(1, 0))
    assert os.read(reader.fileno(), 4096).count(b"\n") == 1


def test_writer_without_a_reader_is_no_error() -> None:
    writer = NewsWriter("box/1")
    writer.close_read_end()  # so that the pipe has no reader
    writer.send(news(1, 0))
    writer.cut("box/2")
    writer.close()
    writer.close()


def test_reader_without_a_writer_keeps_the_last_news() -> None:
    writer = NewsWriter("box/1")
    reader = NewsReader(os.dup(writer.read_end))
    writer.send(news(1, 2))
    assert not reader.ended
    writer.close()
    assert reader.latest() == news(1, 2)
    assert reader.ended
    reader.close()
    assert (reader.latest(), reader.fileno()) == (news(1, 2), -1)


@pytest.mark.parametrize("text", ["", "7", "x:y", "999:1", f"{'9' * 30}:1", "-1:1"])
def test_from_environ_with_malformed_text_returns_none(text: str) -> None:
    assert NewsReader.from_environ({NEWS: text} if text else {}) is None


def test_from_environ_with_a_reused_descriptor_returns_none() -> None:
    reading, writing = os.pipe()
    inode = os.fstat(reading).st_ino
    with open(os.devnull) as other:
        assert NewsReader.from_environ({NEWS: f"{other.fileno()}:{inode}"}) is None
    assert NewsReader.from_environ({NEWS: f"{reading}:{inode + 1}"}) is None
    os.close(reading)
    os.close(writing)


def test_reader_in_forked_child_reads_nothing(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    writer.send(news(1, 0))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if reader.latest() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.latest() == news(1, 0)


def test_worker_inherits_its_end_and_its_children_do_not() -> None:
    writer = NewsWriter("box/1")
    code = """
import os, subprocess, sys
from gradwire.membership.client.news_pipe import NewsReader
reader = NewsReader.from_environ()
if reader is None:
    print("none")
else:
    print(reader.latest().generation)
    sys.stdout.flush()
    subprocess.run([sys.executable, *sys.orig_argv[1:]], check=True, close_fds=False)
"""
    writer.send(news(5, 0))
    environ = os.environ | {NEWS: writer.variable}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, pass_fds=[writer.read_end], capture_output=True, text=True, timeout=60)
    writer.close_read_end()
    writer.close()
    assert (done.stdout, done.stderr) == ("5\nnone\n", "")
