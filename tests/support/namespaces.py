"""Two hosts on one machine: network namespaces with a switch between them.

A namespace exists as long as a process in it. Here this is `cat`, which ends when the test closes its pipe. Nothing has
a name, so nothing remains, however the test ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

LONG = 30.0
CABLE = "cable"  # the name of the network interface on both hosts


class Namespace:
    """A network namespace with only a loopback interface. It ends when `ends` closes."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        command = ["unshare", "--net", "sh", "-c", "echo in; exec cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ends.callback(holder.communicate)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"in\n":
            raise OSError(holder.stderr.read().decode().strip())
        self.pid = holder.pid
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        command = ["nsenter", "--net", f"--target={self.pid}", "ip", *words]
        done = subprocess.run(command, capture_output=True, timeout=LONG)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.decode().strip()}")


def enter(pid: int) -> None:
    """Move this process into the network namespace of another one. Other threads of this process are not moved."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Hosts:
    """Host 0 is at 10.77.0.1, host 1 at 10.77.0.2; or in another network of 256 addresses."""

    def __init__(self, ends: contextlib.ExitStack, network: str = "10.77.0") -> None:
        self._network = network
        self._switch, *self._hosts = (Namespace(ends) for _ in range(3))
        self._switch.ip("link", "add", "switch", "type", "bridge")
        self._switch.ip("link", "set", "switch", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            host.ip("link", "add", CABLE, "type", "veth", "peer", "name", port, "netns", str(self._switch.pid))
            host.ip("addr", "add", f"{self.address(number)}/24", "dev", CABLE)
            host.ip("link", "set", CABLE, "up")
            self._switch.ip("link", "set", port, "master", "switch", "up")

    def address(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    @property
    def pids(self) -> list[int]:
        """The pid of a process on each host, for `enter`."""
        return [host.pid for host in self._hosts]

    def cut(self) -> None:
        """Disconnect a port of the switch. Packets are lost, and neither host gets an error."""
        self._switch.ip("link", "set", "port1", "nomaster")

    def mend(self) -> None:
        """Connect the port again, after `cut`."""
        self._switch.ip("link", "set", "port1", "master", "switch")

    def unplug(self) -> None:
        """Disable the network interface of host 0. Host 0 gets errors; the other host gets none."""
        self._hosts[0].ip("link", "set", CABLE, "down")


@pytest.fixture(name="hosts")
def hosts_fixture(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts; the fixture's parameter, if there is one, is their network, such as "10.0.0"."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root{''.join(f', {tool}' for tool in missing)}")
    with contextlib.ExitStack() as ends:
        try:
            hosts = Hosts(ends, *([request.param] if hasattr(request, "param") else []))
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield hosts
