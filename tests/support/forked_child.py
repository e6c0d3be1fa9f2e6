"""A forked child that runs one function and reports which sockets and pipes it still holds."""

from __future__ import annotations

import os
from collections.abc import Callable


def descriptors() -> set[str]:
    """The open sockets and pipes of this process, by the kernel's names for them, which no other one gets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if target.startswith(("socket:", "pipe:")):
            found.add(target)
    return found


def name_of(descriptor: int) -> str:
    """The kernel's name for an open descriptor."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def descriptors_after(action: Callable[[], None]) -> set[str]:
    """The sockets and pipes that a forked child of this process holds after `action`."""
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(tells, " ".join(descriptors()).encode())
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(hears) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    assert told, "the child failed"
    return set(told.split())
