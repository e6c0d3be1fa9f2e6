"""Sphinx extension of gradwire's site: what `docs/conf.py` cannot express as settings.

navigation   arranges all pages into the sections of the sidebar
docstrings   translates gradwire's docstrings into reStructuredText
commands     describes the commands of `gradwire`, from click
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import inspect

from gradwire import errors
from website import commands, docstrings, navigation

ROOT = Path(__file__).parents[2]
GENERATED: dict[str, Callable[[], str]] = {
    "<!-- all commands -->": commands.markdown,
    "<!-- error tree -->": lambda: f"```text\n{docstrings.indented(errors.__doc__ or '')}\n```",
}
ARRAY = re.compile(r"~?numpy\.ndarray\[.*?dtype\[[^]]*\]\]")
SHORT_CODE = 24  # characters
LONG_CELL = 100  # characters
BREAKS = re.compile(r"(?<=[/_])(?=\w)|(?<=::)")  # where a path or a long name may continue on the next line
# Programs get objects of these classes from others, and do not call their constructors.
NOT_CONSTRUCTED = {
    *(f"gradwire.{name}" for name in ("Capabilities", "Elastic", "Group", "Step", "Stream", "Work")),
    *(f"gradwire.membership.types.{name}" for name in ("CheckpointStatus", "Member", "News")),
    *(f"gradwire.simulate.fixture.{name}" for name in ("Fault", "Ranks", "Run")),
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hooks of this extension."""
    app.connect("env-get-outdated", _completed_pages)
    app.connect("source-read", _complete_page)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _translate_docstring)
    app.connect("doctree-read", _polish)
    app.connect("missing-reference", _find_by_last_name)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _completed_pages(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Return the pages to read again although their files have not changed: those that `_complete_page` adds to."""
    return [name for name in env.found_docs if name.endswith(("README", "command-line", "errors"))]


def _complete_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what is not in the file: the commands, the tree of errors, and the sections of the sidebar."""
    text = source[0]
    for marker, content in GENERATED.items():
        if marker in text:
            text = text.replace(marker, content())
    source[0] = text + navigation.toctrees(name, ROOT)


def _translate_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = docstrings.translate(lines)


def _shorten_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Show `ndarray` without parameters, and constructors only where programs call them: also below a mocked class."""
    if what == "exception" or name in NOT_CONSTRUCTED:
        return "", None
    if what == "class" and thing.__base__.__module__.split(".")[0] in app.config.autodoc_mock_imports:
        own = inspect.signature(thing.__init__, bound_method=True)
        return inspect.stringify_signature(own, show_return_annotation=False), None
    return None if signature is None else (ARRAY.sub("ndarray", signature), returns and ARRAY.sub("ndarray", returns))


def _polish(app: Sphinx, tree: nodes.document) -> None:
    """Help style.css to wrap code and the cells of tables, and write a dash between a parameter and its meaning."""
    for code in tree.findall(nodes.literal):
        if len(code.astext()) <= SHORT_CODE:
            code["classes"].append("short")
        elif all(isinstance(child, nodes.Text) for child in code.children):
            _let_wrap(code)
    for cell in tree.findall(nodes.entry):
        if len(cell.astext()) > LONG_CELL:
            cell["classes"].append("long")
        if all(isinstance(part, nodes.literal) or part == " " for line in cell.children for part in line.children):
            cell["classes"].append("codes")
    for text in [text for text in tree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


def _let_wrap(code: nodes.literal) -> None:
    """Let the browser begin a new line inside of code. What a reader copies from the page stays the same."""
    first, *others = BREAKS.split(code.astext())
    code.clear()
    code += nodes.Text(first)
    for part in others:
        code += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def _find_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve `Work` and `gradwire.group.work.Work` as `gradwire.Work`, if that is public."""
    target = docstrings.public_name(node.get("reftarget", "").rpartition(".")[2])
    if node.get("refdomain") != "py" or target is None or target == node["reftarget"]:
        return None
    python = env.domains.python_domain
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)
