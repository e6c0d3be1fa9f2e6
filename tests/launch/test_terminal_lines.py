"""Bytes of a stream, split into lines as a terminal shows them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.launch.terminal_lines import Lines


def cut(*chunks: bytes) -> list[str]:
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.end()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"one", ["one"]),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\ntwo", ["one", "", "two"]),
        (b"windows\r\nunix\n", ["windows", "unix"]),
        (b" 10%\r 50%\r100%\ndone\n", ["100%", "done"]),
        (b"\r 10%\r100%", ["100%"]),
        (b"gr\xc3\xbc\xc3\x9fe\n", ["grüße"]),
        (b"\xff\xfe\n", ["\\xff\\xfe"]),
        (b"cut \xc3", ["cut \\xc3"]),
        (b"nul \x00 bell \x07 del \x7f back \x08\x08 tab \t\n", ["nul \\x00 bell  del \\x7f back  tab \t"]),
        (b"\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        (b"\x1b[2K\x1b[1Aup\x1b[10;20H\n", ["up"]),
        (b"\x1b]0;title\x07text\x1b]8;;link\x1b\\!\n", ["text!"]),
    ],
)
def test_terminal_lines_are_those_that_a_terminal_would_show(data: bytes, expected: list[str]) -> None:
    assert cut(data) == expected


@given(st.text(alphabet="ab\r\n\x1b[m\x00üß€😀"), st.lists(st.integers(0, 60)))
def test_terminal_lines_are_the_same_however_the_bytes_are_cut(text: str, places: list[int]) -> None:
    data = text.encode()
    edges = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    assert cut(*(data[start:stop] for start, stop in itertools.pairwise(edges))) == cut(data)


@given(st.binary())
def test_terminal_lines_of_any_bytes_have_no_control_characters(data: bytes) -> None:
    for line in cut(data):
        assert not set(line) & (set(map(chr, range(32))) - {"\t", "\x1b"})


def test_terminal_lines_report_an_unfinished_line() -> None:
    lines = Lines()
    assert lines.feed(b"loading ") == []
    assert (lines.unfinished, lines.redrawn) == ("loading ", False)
    assert lines.feed(b"1%\rloading 2%\r") == []
    assert (lines.unfinished, lines.redrawn) == ("loading 2%", True)
    assert lines.feed(b"loaded\n") == ["loaded"]
    assert (lines.unfinished, lines.redrawn) == ("", False)


def test_terminal_line_without_end_is_bounded() -> None:
    lines = Lines()
    total = 0
    for _ in range(64):
        total += sum(map(len, lines.feed(b"x" * 65536)))
        assert len(lines.unfinished) <= 65536
    assert total + len(lines.unfinished) == 64 * 65536
