"""Translates gradwire's docstrings into reStructuredText.

The docstrings use Markdown's backticks, sections such as `Args:` and `Raises:`, and tables of aligned words.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import gradwire

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_ROW = re.compile(r"^(\w[\w.*]*) {2,}(\S.*)$")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}
_FRAMEWORKS = ("jax", "torch")


def public_name(name: str) -> str | None:
    """Return the full name of what a docstring calls `gw.Group`, `Group` or `Group.rank`; None if it is not public.

    >>> public_name("Group.rank"), public_name("gw.elastic"), public_name("rank")
    ('gradwire.Group.rank', 'gradwire.elastic', None)
    >>> public_name("gw.jax.jit"), public_name("jax.jit")
    ('gradwire.jax.jit', None)
    """
    own = re.sub(r"^(gw|gradwire)\.", "", name)
    first = own.split(".")[0]
    return f"gradwire.{own}" if first in gradwire.__all__ or (own != name and first in _FRAMEWORKS) else None


def translate(lines: Sequence[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText; examples stay as they are."""
    translated: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].lstrip().startswith(">>>"):
            translated += paragraph
        elif section := _SECTION.match(paragraph[0]):
            translated += _fields(section[1], textwrap.dedent("\n".join(paragraph[1:])))
        elif _ROW.match(paragraph[0]) and all(_ROW.match(line) or line.startswith("  ") for line in paragraph):
            translated += _definitions(paragraph)
        elif paragraph[0].startswith("    "):
            translated += ["::", "", *paragraph]
        else:
            translated += _with_references("\n".join(paragraph)).split("\n")
        translated.append("")
    return translated


def indented(docstring: str) -> str:
    """Return the first indented paragraph of a docstring.

    >>> indented("A tree.\\n\\n    root\\n      leaf\\n\\nMore.")
    'root\\n  leaf'
    """
    paragraph = next(lines for lines in _paragraphs(docstring.split("\n")) if lines[0].startswith("    "))
    return textwrap.dedent("\n".join(paragraph))


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _fields(section: str, text: str) -> Iterator[str]:
    """Translate a section: a result, or entries such as `name: what it is`, whose further lines are indented.

    >>> list(_fields("Args", "x: An array\\n    or `None`.\\nop: The reduction."))
    [':param x: An array or ``None``.', ':param op: The reduction.']
    >>> list(_fields("Returns", "A sum: that of x."))
    [':returns: A sum: that of x.']
    """
    kind = _FIELDS.get(section)
    if kind is None:
        yield f":{section.lower()}: {' '.join(_with_references(text).split())}"
        return
    for entry in re.split(r"\n(?=\S)", text):
        name, _, meaning = entry.partition(": ")
        yield f":{kind} {name}: {' '.join(_with_references(meaning).split())}"


def _definitions(rows: Sequence[str]) -> Iterator[str]:
    """Translate rows such as `group    whose ranks train together` into a definition list."""
    for row in rows:
        found = _ROW.match(row)
        if found:
            yield f"``{found[1]}``"
        yield "    " + _with_references(found[2] if found else row.strip())


def _with_references(text: str) -> str:
    return _CODE.sub(_reference, text)


def _reference(found: re.Match[str]) -> str:
    """Translate `code` in backticks: a link if it is a public name or a call of one, a literal otherwise."""
    text = " ".join(found[1].split())
    target = public_name(re.sub(r"\(.*\)$", "", text))
    simple = re.fullmatch(r"[\w.]+(\(\))?", text)
    return f":py:obj:`{text} <{target}>`" if target and simple else f"``{text}``"
