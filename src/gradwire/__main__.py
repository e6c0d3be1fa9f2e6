"""`python -m gradwire` is the `gradwire` command."""

from __future__ import annotations

from gradwire.cli import main

if __name__ == "__main__":
    main(prog_name="python -m gradwire")
