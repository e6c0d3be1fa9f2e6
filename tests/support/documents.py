"""Reads the code blocks of a Markdown page, and runs its commands exactly as they are written.

A page's ``python`` blocks are programs, each complete in itself. A block whose first line is a comment with a file name
(``# train.py``) is stored under that name before the commands of the page run. So is a ``toml`` block.

A ``console`` block has commands behind a prompt, and below each command some of the lines that it prints:

    $ gradwire run -n 2 train.py
    [0] done after … s

`…` stands for any text. The prompt of a page about two machines begins with the name of the machine: `host-a$`. The
blocks of a page run one after the other. Inside a block the machines run at the same time, each its own commands in
order. Variables that a command exports are there in the later blocks of the same machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ""  # the machine of a prompt without a name
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"(host-[a-z])?\$ (.*)")
_FILE_NAME = re.compile(r"# (\w+\.(?:py|toml))\n")
# Where a page names a folder of the repository, its commands find it.
_FOLDERS = ("benchmarks", "examples", "tests")
# scp between the machines of a page: their folders are side by side.
_SCP = """#!/bin/sh
for target; do :; done
while [ $# -gt 1 ]; do cp "$1" "../${target%%:*}/" || exit 1; shift; done
"""


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text and the number of its first line in the page."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None


@dataclass
class Commands:
    """The commands of one machine in a block, and the lines that they should print."""

    lines: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


def code_blocks(page: Path, language: str) -> list[Block]:
    """Return the page's blocks of this language, in order."""
    text = page.read_text("utf-8")
    found = [Block(one[1], one[2], text.count("\n", 0, one.start()) + 2) for one in _BLOCK.finditer(text)]
    return [block for block in found if block.language == language]


def commands_of(block: Block) -> dict[str, Commands]:
    """Return the commands of a console block by machine."""
    machines: dict[str, Commands] = {}
    last, continued = Commands(), False
    for line in block.text.splitlines():
        prompt = _PROMPT.fullmatch(line)
        if continued:
            last.lines[-1] += f"\n{line}"
        elif prompt:
            last = machines.setdefault(prompt[1] or HERE, Commands())
            last.lines.append(prompt[2])
        elif line.strip() not in ("", "…"):
            last.printed.append(line)
        continued = line.endswith("\\")
    return machines


def machines_of(page: Path) -> set[str]:
    """Return the names of the machines that a page's commands are for."""
    return {machine for block in code_blocks(page, "console") for machine in commands_of(block)}


def clean_environ(home: Path) -> dict[str, str]:
    """Return an environment in which no job is described, and with a home directory of its own."""
    dropped = ("GRADWIRE_", "PYTEST_", "XDG_", "FORCE_COLOR")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = f"{home / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    return environ | {"HOME": str(home), "PATH": path, "NO_COLOR": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}


def run_program(block: Block, folder: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a Python block on some ranks; as a test, if it is one."""
    name = "test_page.py" if "\ndef test_" in block.text else block.file_name or "program.py"
    (folder / name).write_text(block.text, "utf-8")
    if name == "test_page.py":
        command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    else:
        command = ["gradwire", "run", "-n", str(ranks), name]
    return subprocess.run(
        command, cwd=folder, env=clean_environ(folder), capture_output=True, text=True, timeout=120, check=False
    )


def run_commands(
    page: Path, folder: Path, networks: Mapping[str, int] | None = None, without: Sequence[str] = ()
) -> None:
    """Run all commands of a page; `AssertionError` shows what one has printed if it failed or printed something else.

    `networks` has, for each machine, the pid of a process in its network namespace. Blocks that contain one of the
    texts in `without` are left out.
    """
    networks = networks or {}
    _prepare(page, folder, sorted(machines_of(page)))
    for block in code_blocks(page, "console"):
        if any(text in block.text for text in without):
            continue
        machines = commands_of(block)
        with contextlib.ExitStack() as ends:
            started = [
                (commands, ends.enter_context(_shell(commands.lines, folder, machine, networks.get(machine))))
                for machine, commands in machines.items()
            ]
            outputs = [shell.communicate(timeout=240)[0] for _, shell in started]
            where, output = f"{page.name}, line {block.line}", "\n".join(outputs)
            failed = [commands.lines for commands, shell in started if shell.returncode]
            assert not failed, f"{where}: {failed} failed\n{output}"
            missing = [line for commands, _ in started for line in commands.printed if not _occurs(line, output)]
            assert not missing, f"{where}: not printed: {missing}\n{output}"


def _prepare(page: Path, folder: Path, machines: Sequence[str]) -> None:
    tools = folder / "bin"
    tools.mkdir()
    (tools / "scp").write_text(_SCP)
    (tools / "scp").chmod(0o755)
    for machine in machines:
        home = folder / machine
        home.mkdir(exist_ok=True)
        for name in _FOLDERS:
            (home / name).symlink_to(ROOT / name)
        for block in (*code_blocks(page, "python"), *code_blocks(page, "toml")):
            if block.file_name:
                (home / block.file_name).write_text(block.text, "utf-8")


@contextlib.contextmanager
def _shell(lines: Sequence[str], folder: Path, machine: str, network: int | None) -> Iterator[subprocess.Popen[str]]:
    """A shell that runs these commands; it and the processes that it has left are killed at the end."""
    exported = shlex.quote(str(folder / f"exported-{machine}"))
    script = "\n".join(["set -e", f"[ ! -e {exported} ] || . {exported}", *lines, f"export -p > {exported}"])
    command = ["bash", "-c", script]
    if network is not None:
        host = ["unshare", "--uts", "sh", "-c", f'hostname {machine} && exec "$@"', "sh"]
        command = ["nsenter", f"--net=/proc/{network}/ns/net", *host, *command]
    shell = subprocess.Popen(
        command,
        cwd=folder / machine,
        env=clean_environ(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield shell
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def _occurs(line: str, output: str) -> bool:
    """Whether a line was printed, by any worker: which of them is rank 0 depends on which one registers first."""
    pattern = ".*".join(map(re.escape, line.split("…")))
    pattern = re.sub(r"^\\\[\d+\\\]", r"\\[\\d+\\]", pattern)
    return re.search(f"^{pattern}$", output, re.MULTILINE) is not None
