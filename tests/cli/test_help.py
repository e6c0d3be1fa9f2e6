"""The help texts: nothing is cut off at 80 columns, and every option is explained."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from gradwire.cli import main

COMMANDS = sorted(main.commands)


def help_of(*command: str) -> str:
    result = CliRunner().invoke(main, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda command: " ".join(command) or "-")
def test_help_fits_into_80_columns_and_is_not_cut_off(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "..." not in text.replace("[ARGS]...", "").replace("[COLLECTIVES]...", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str) -> None:
    options = [option for option in main.commands[name].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []
