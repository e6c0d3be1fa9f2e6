"""A forked child that runs one function and reports which file descriptors it still holds."""

from __future__ import annotations

import os
from collections.abc import Callable


def descriptors() -> set[int]:
    """The open file descriptors of this process, without those of devices and files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if not target.startswith("/"):
            found.add(int(name))
    return found


def descriptors_after(action: Callable[[], None]) -> set[int]:
    """The sockets and pipes that a forked child of this process holds after `action`."""
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(tells, " ".join(map(str, descriptors())).encode())
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(hears) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    assert told, "the child failed"
    return set(map(int, told.split())) - {hears, tells}
