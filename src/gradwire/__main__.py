"""Runs the `gradwire` command as `python -m gradwire`."""

from __future__ import annotations

from gradwire.cli import main

if __name__ == "__main__":
    main(prog_name="python -m gradwire")
