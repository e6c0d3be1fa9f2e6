"""A forked child that runs one function and reports which sockets and pipes it still has open."""

from __future__ import annotations

import os
from collections.abc import Callable


def descriptors() -> set[str]:
    """Return the open sockets and pipes of this process, by the kernel's unique names for them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(("socket:", "pipe:")):
            found.add(target)
    return found


def name_of(descriptor: int) -> str:
    """Return the kernel's name for an open descriptor."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def descriptors_after(action: Callable[[], None]) -> set[str]:
    """Return the sockets and pipes that a forked child of this process has open after `action`."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(write_end, " ".join(descriptors()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        names = answer.read()
    os.waitpid(child, 0)
    assert names, "the child failed"
    return set(names.split())
