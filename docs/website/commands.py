"""Describes the commands of `gradwire` as Markdown, from what click knows about them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import click

from gradwire.cli import main


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
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if isinstance(option, click.Option) and record:
            yield f"`{record[0]}`\n: {_plain(record[1]) or '…'}"


def _prose(text: str) -> Iterator[str]:
    """Translate a help text: a paragraph that begins with \\b is an example, shown as it is."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            example = textwrap.dedent(paragraph.removeprefix("\b")).strip("\n")
            yield f"```text\n{example}\n```"
        else:
            yield _plain(paragraph)


def _plain(text: str) -> str:
    """Escape what Markdown would take for markup."""
    return re.sub(r"([*_<])", r"\\\1", text)
