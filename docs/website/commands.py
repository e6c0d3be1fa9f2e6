"""Describes the commands of `gradwire` as Markdown, from what click knows about them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from gradwire.cli import main

MARKER = "<!-- all commands -->"


def markdown() -> str:
    """Return one section for each command: its usage, its help text and its options."""
    context = click.Context(main, info_name="gradwire")
    return "\n\n".join("\n\n".join(_section(context, name)) for name in main.list_commands(context))


def _section(parent: click.Context, name: str) -> Iterator[str]:
    command = main.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    yield f"## gradwire {name}"
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```"
    yield from _prose(command.help or "")
    rows = [_row(context, option) for option in command.get_params(context) if isinstance(option, click.Option)]
    yield "\n".join(["| option | meaning |", "|---|---|", *rows])


def _prose(text: str) -> Iterator[str]:
    """Translate a help text: a paragraph that begins with \\b is an example, shown as it is."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            yield f"```text\n{_dedented(paragraph.removeprefix(chr(8)).strip(chr(10)))}\n```"
        else:
            yield re.sub(r"([*_<|])", r"\\\1", paragraph)


def _dedented(text: str) -> str:
    lines = text.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[margin:] for line in lines)


def _row(context: click.Context, option: click.Option) -> str:
    names, meaning = option.get_help_record(context) or ("", "")
    return f"| {_cell(f'`{names}`')} | {_cell(_plain(meaning))} |"


def _plain(text: str) -> str:
    return re.sub(r"([*_<])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
