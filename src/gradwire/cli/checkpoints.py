"""`gradwire checkpoints`: lists the checkpoints in a folder, verifies, compares and exports them."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradwire.cli.signals import signals_end
from gradwire.errors import CheckpointError, GradwireError

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.training.checkpoints.checkpoint import Checkpoint
    from gradwire.training.checkpoints.compare import Comparison, Difference

_HELP = """List the checkpoints in a folder, the newest first.

\b
  gradwire checkpoints saved                     list them
  gradwire checkpoints saved --verify            also read all bytes
  gradwire checkpoints saved --diff 99 latest    what differs
  gradwire checkpoints saved --export latest --to model.npz

A CHECKPOINT is named by its step, its folder's name or path, or "latest". A checkpoint without all of its files is
torn: it is being written, or the job was killed meanwhile. Torn ones are never used, and later ones replace them. The
exit code is 1 if --verify finds damaged bytes.
"""
_RUN = 12  # digits of a run's id in the list


@click.command(
    help=_HELP,
    short_help="List, verify, compare and export checkpoints.",
    context_settings={"max_content_width": 120},
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read all bytes and check their digests.")
@click.option(
    "--diff", "pair", nargs=2, metavar="A B", help="Show what differs between two checkpoints: arrays and values."
)
@click.option("--export", "name", metavar="CHECKPOINT", help="Write this checkpoint as one plain file.")
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file for --export: its name ends with .npz or .safetensors.",
)
@click.option("--force", is_flag=True, help="Let --export replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print the list or the differences as JSON.")
def checkpoints(
    folder: Path,
    verify: bool,
    pair: tuple[str, str] | None,
    name: str | None,
    target: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    if verify + (pair is not None) + (name is not None) > 1:
        raise click.UsageError("pass only one of --verify, --diff and --export")
    if (name is None) != (target is None) or (force and name is None):
        raise click.UsageError("--export, --to and --force belong together: --export CHECKPOINT --to FILE [--force]")
    try:
        with signals_end():
            found = _find(folder)
            if pair is not None:
                _compare(_named(found, folder, pair[0]), _named(found, folder, pair[1]), as_json)
            elif name is not None and target is not None:
                _export(_named(found, folder, name), target, force)
            elif _list(found, folder, verify, as_json):
                sys.exit(1)
    except GradwireError as error:
        raise click.ClickException(_printable(str(error))) from error
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _find(folder: Path) -> list[Checkpoint]:
    from gradwire.training.checkpoints.checkpoint import parse_folder_name
    from gradwire.training.checkpoints.folder import CheckpointFolder

    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}")
    if parse_folder_name(folder.resolve().name):
        raise CheckpointError(f"{folder} is one checkpoint: pass the folder that contains it")
    return CheckpointFolder(folder).find()


def _named(found: Sequence[Checkpoint], folder: Path, name: str) -> Checkpoint:
    """Return the checkpoint of a name: the newest complete one, if several have this step."""
    if name == "latest":
        fitting = [one for one in found if one.is_complete]
    elif name.isascii() and name.isdigit() and len(name) < 20:
        fitting = [one for one in found if one.step == int(name)]
    else:
        folder_name = Path(name).name
        fitting = [one for one in found if one.path.name == folder_name]
    if not fitting:
        steps = ", ".join(dict.fromkeys(str(one.step) for one in found if one.is_complete)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint {name!r}; steps of complete checkpoints: {steps}")
    return next((one for one in fitting if one.is_complete), fitting[0])


# -- the list ----------------------------------------------------------------------------------------------------------


def _list(found: Sequence[Checkpoint], folder: Path, verify: bool, as_json: bool) -> bool:
    """Print the list, and return whether a complete checkpoint is damaged."""
    problems = {one.path: [one.problem] for one in found if one.problem}
    complete = [one for one in found if one.is_complete]
    damaged = _verify(complete) if verify else {}
    if as_json:
        print(json.dumps([_as_json(one, (problems | damaged).get(one.path, []), verify) for one in found], indent=1))
        return bool(damaged)
    if not found:
        click.echo(f"{folder} has no checkpoints")
        return False
    _show(_table(found, damaged, "verified" if verify else "complete"))
    for one in found:
        for problem in (problems | damaged).get(one.path, []):
            kind = "torn" if one.problem else "damaged"
            click.echo(f"step {one.step} of run {_run(one)} is {kind}: {_printable(problem)}")
    return bool(damaged)


def _verify(complete: Sequence[Checkpoint]) -> dict[Path, list[str]]:
    with _progress("verifying", sum(map(_data_size, complete))) as advance:
        results = {one.path: one.verify(advance) for one in complete}
    return {path: problems for path, problems in results.items() if problems}


def _table(found: Sequence[Checkpoint], damaged: dict[Path, list[str]], good: str) -> Table:
    import time

    from rich.table import Table

    table = Table("step", "run", "generation", "ranks", "size", "written", "state", box=None, pad_edge=False)
    for column in (0, 2, 3, 4):
        table.columns[column].justify = "right"
    for one in found:
        ranks = "" if one.found is None else str(one.found.head.size)
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(_created(one)))
        state = "torn" if one.problem else "damaged" if one.path in damaged else good
        table.add_row(str(one.step), _run(one), str(one.fence.generation), ranks, _size(one.nbytes), written, state)
    return table


def _as_json(one: Checkpoint, problems: list[str], verified: bool) -> dict[str, Any]:
    complete = not one.problem
    return {
        "path": str(one.path),
        "step": one.step,
        "run": one.fence.run.hex(),
        "generation": one.fence.generation,
        "ranks": one.found.head.size if one.found is not None else None,
        "bytes": one.nbytes,
        "written": _created(one),
        "version": one.found.version if one.found is not None else None,
        "complete": complete,
        "verified": not problems if verified and complete else None,
        "problems": problems,
    }


def _data_size(one: Checkpoint) -> int:
    return sum(stored.array.nbytes for stored in (*one.replicated, *one.sharded))


def _created(one: Checkpoint) -> float:
    """Return the time at which a checkpoint was published; of a torn one, the time of its last change."""
    if one.found is not None:
        return min(max(one.found.created, 0.0), 253402214400.0)  # year 9999: what the C library can format
    with contextlib.suppress(OSError):
        return one.path.stat().st_mtime
    return 0.0


def _run(one: Checkpoint) -> str:
    return one.fence.run.hex()[:_RUN]


def _size(nbytes: int) -> str:
    """Format a number of bytes for people.

    >>> _size(999), _size(1_234_567)
    ('999 B', '1.2 MB')
    """
    amount, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.1f} {units[0]}" if units[0] != "B" and amount < 99.95 else f"{amount:.0f} {units[0]}"


# -- differences and exports -------------------------------------------------------------------------------------------


def _compare(before: Checkpoint, after: Checkpoint, as_json: bool) -> None:
    from gradwire.training.checkpoints.compare import compare

    with _progress("comparing", _data_size(before)) as advance:
        found = compare(before, after, advance)
    if as_json:
        print(json.dumps(_difference_json(before, after, found), indent=1))
        return
    for sign, one in (("-", before), ("+", after)):
        click.echo(f"{sign} step {one.step}, run {_run(one)}, generation {one.fence.generation}")
    if found.is_empty:
        click.echo(f"no differences: all {found.equal} arrays and all values are equal")
        return
    if found.arrays:
        click.echo(f"arrays: {found.equal} equal, {len(found.arrays)} differ")
        _show(_grid([[_printable(one.name), *_explained(one)] for one in found.arrays]))
    if found.values:
        click.echo(f"values: {len(found.values)} differ")
        shown = {name: [repr(side[0]) if side else "none" for side in pair] for name, pair in found.values.items()}
        _show(_grid([[_printable(name), _printable(" → ".join(pair))] for name, pair in shown.items()]))


def _explained(one: Difference) -> tuple[str, str]:
    """Return the dtype and shape of an array, and how it differs."""
    if not one.before or not one.after:
        return one.before or one.after, "added" if one.after else "removed"
    if one.differing is None:
        return one.before, f"now {one.after}"
    if one.differing == 0:
        return one.after, "equal values, other bits"
    return one.after, f"{one.differing} of {one.elements} differ, by at most {one.largest:.3g}"


def _difference_json(before: Checkpoint, after: Checkpoint, found: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    from gradwire.training.checkpoints.export import json_safe

    return {
        "before": str(before.path),
        "after": str(after.path),
        "equal": found.equal,
        "arrays": [{key: json_safe(value) for key, value in asdict(one).items()} for one in found.arrays],
        "values": {name: [[json_safe(x) for x in side] for side in pair] for name, pair in found.values.items()},
    }


def _export(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    from gradwire.training.checkpoints.export import export

    with _progress("exporting", _data_size(checkpoint)) as advance:
        export(checkpoint, target, force=force, on_bytes=advance)
    click.echo(f"wrote step {checkpoint.step} of run {_run(checkpoint)} to {target}: {_size(target.stat().st_size)}")


# -- output ------------------------------------------------------------------------------------------------------------


def _show(table: Table) -> None:
    """Print a table in the width of the terminal, or in 80 columns."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _grid(rows: list[list[str]]) -> Table:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, show_header=False, padding=(0, 0, 0, 2))
    for _ in rows[0]:
        grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _printable(text: str) -> str:
    """Escape what could change the terminal, or cannot be printed: names come from the files."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@contextlib.contextmanager
def _progress(action: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts bytes. A terminal shows them as a bar on the standard error."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with click.progressbar(length=max(nbytes, 1), label=action, file=sys.stderr) as bar:
        yield bar.update
