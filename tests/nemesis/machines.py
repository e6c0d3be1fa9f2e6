"""The machines of a job under the nemesis: network namespaces if they can be created, else this machine for all.

Machine 0 to 2 have workers; the coordinator and its disk are on a machine of their own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

from gradwire.launch import worker_setup
from nemesis.plan import MACHINES
from support.namespaces import CABLE, Namespace

COORDINATOR = MACHINES  # the number of its machine
PORT = 7077  # in a network that nobody else has
NOWHERE = "02:00:00:00:de:ad"  # the hardware address of nobody
DISK = 8 << 20  # bytes, for the journal


class Machines(ABC):
    """What differs between machines with networks of their own and one machine for all."""

    can_cut = False
    address: str  # of the coordinator

    def __init__(self, folder: Path) -> None:
        self.blocked: set[tuple[int, int]] = set()  # machines, and others that they cannot reach
        self.disk = folder / "disk"  # for the coordinator
        self.disk.mkdir()

    @property
    def seen_disk(self) -> Path:
        """Where the coordinator's disk is for us."""
        return self.disk

    @abstractmethod
    def command(self, machine: int) -> list[str]:
        """What stands before a command that is to run on a machine."""

    def block(self, machine: int, other: int) -> None:
        """From now on no packet of a machine reaches the other one, and nobody is told so."""
        raise NotImplementedError

    def unblock(self, machine: int, other: int) -> None:
        """Packets get through again."""
        raise NotImplementedError

    @abstractmethod
    def fill_disk(self, pid: int) -> None:
        """The process, the coordinator, can write no more to its disk."""

    @abstractmethod
    def free_disk(self, pid: int) -> None:
        """There is room again, for this process and for others."""


class OneMachine(Machines):
    """Without privileges: nothing can be cut, and the full disk is a limit to the size of files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"127.0.0.1:{worker_setup.free_port()}"

    def command(self, machine: int) -> list[str]:
        return []

    def fill_disk(self, pid: int) -> None:
        self._limit(pid, 0)

    def free_disk(self, pid: int) -> None:
        self._limit(pid, resource.getrlimit(resource.RLIMIT_FSIZE)[0])

    def _limit(self, pid: int, nbytes: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class ManyMachines(Machines):
    """A network namespace for each machine, with a switch between them, and a small disk for the coordinator.

    They last as long as the processes that hold them open, which end with `ends` or with this process.
    """

    can_cut = True

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        super().__init__(folder)
        self.address = f"{_address(COORDINATOR)}:{PORT}"
        self._mount = _mount(self.disk, ends)
        self._switch, *self._hosts = (Namespace(ends) for _ in range(MACHINES + 2))
        self._switch.ip("link", "add", "switch", "type", "bridge")
        self._switch.ip("link", "set", "switch", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            host.ip("link", "add", CABLE, "type", "veth", "peer", "name", port, "netns", str(self._switch.pid))
            host.ip("addr", "add", f"{_address(number)}/24", "dev", CABLE)
            host.ip("link", "set", CABLE, "up")
            self._switch.ip("link", "set", port, "master", "switch", "up")

    @property
    def seen_disk(self) -> Path:
        return Path(f"/proc/{self._mount}/root", *self.disk.parts[1:])

    def command(self, machine: int) -> list[str]:
        files = [f"--net=/proc/{self._hosts[machine].pid}/ns/net"]
        if machine == COORDINATOR:
            files.append(f"--mount=/proc/{self._mount}/ns/mnt")
        return ["nsenter", *files]

    def block(self, machine: int, other: int) -> None:
        where = ("lladdr", NOWHERE, "dev", CABLE, "nud", "permanent")
        self._hosts[machine].ip("neigh", "replace", _address(other), *where)
        self.blocked.add((machine, other))

    def unblock(self, machine: int, other: int) -> None:
        self._hosts[machine].ip("neigh", "del", _address(other), "dev", CABLE)
        self.blocked.remove((machine, other))

    def fill_disk(self, pid: int) -> None:
        with contextlib.suppress(OSError), (self.seen_disk / "filler").open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free_disk(self, pid: int) -> None:
        (self.seen_disk / "filler").unlink(missing_ok=True)


def machines(folder: Path, ends: contextlib.ExitStack) -> tuple[Machines, str]:
    """As many machines as can be had here; and, if that is one, why."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        return OneMachine(folder), f"network namespaces need root{''.join(f', {tool}' for tool in missing)}"
    try:
        with contextlib.ExitStack() as stack:
            found = ManyMachines(folder, stack)
            ends.push(stack.pop_all())
            return found, ""
    except OSError as error:
        (folder / "disk").rmdir()
        return OneMachine(folder), f"no namespaces can be had here: {error}"


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _mount(folder: Path, ends: contextlib.ExitStack) -> int:
    """A small disk at a folder that only those see who enter the mount namespace of the process that this returns."""
    script = f'mount -t tmpfs -o size={DISK} tmpfs "$1" && echo in; exec cat'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ends.callback(holder.communicate)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"in\n":
        holder.kill()
        raise OSError(holder.stderr.read().decode().strip())
    return holder.pid
