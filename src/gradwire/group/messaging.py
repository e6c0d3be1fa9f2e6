"""Point to point: messages matched by peer and tag, outside the order of the collectives."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import DType, raw, view
from gradwire.errors import ArrayError, InvalidRank, InvalidSize
from gradwire.operations.call import check_rank
from gradwire.post import Post
from gradwire.work import bounded

MAX_TAG = (1 << 62) - 1


class Messaging:
    """The part of a group that two ranks use without the others."""

    def __init__(self, post: Post, rank: int, size: int, timeout: float) -> None:
        self._post = post
        self._rank = rank
        self._size = size
        self._timeout = timeout

    def send(self, x: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send the bytes of x to a rank. Up to 64 KiB return at once; longer ones wait for the matching `recv`.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.arange(3), dst=1, tag=7)
        >>> x = np.zeros(3, int); two.recv(x, src=0, tag=7), x
        (0, array([0, 1, 2]))
        >>> one.close(); two.close()
        """
        peer = self._peer(dst)
        self._post.send(raw(view(x, writable=False).load()), peer, checked_tag(tag), self._seconds(timeout))

    def recv(self, x: Any, src: int | None = None, tag: int = 0, timeout: float | None = None) -> int:
        """Receive into x from a rank (None: anyone) and return who sent it; a `recv` that timed out can be repeated.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> try: two.recv(np.zeros(3), timeout=0.01)
        ... except gw.Timeout: one.send(np.ones(3), dst=1)
        >>> x = np.zeros(3); two.recv(x), x
        (0, array([1., 1., 1.]))
        >>> one.close(); two.close()
        """
        source = None if src is None else self._peer(src)
        if self._size == 1:
            raise InvalidRank("this rank is alone: nobody can send it anything")
        target = view(x, writable=True)
        request = self._post.post_request(raw(target.flat), source, checked_tag(tag))
        sender = self._post.finish_request(request, self._seconds(timeout))
        target.store()
        return sender

    def sendrecv(self, x: Any, y: Any, dst: int, src: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send x to one rank while y receives from another (or the same): never locks up, whatever the sizes.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.ones(3), dst=1)
        >>> x, y = np.zeros(3), np.zeros(3)
        >>> two.sendrecv(x, y, dst=0, src=0); y
        array([1., 1., 1.])
        >>> one.close(); two.close()
        """
        to, source = self._peer(dst), self._peer(src)
        seconds = self._seconds(timeout)
        given, target = view(x, writable=False), view(y, writable=True)
        if arrays.overlap(given, target):
            raise ArrayError("y overlaps x: it would be overwritten while it is sent")
        deadline = time.monotonic() + seconds
        request = self._post.post_request(raw(target.flat), source, checked_tag(tag))
        try:
            self._post.send(raw(given.load()), to, checked_tag(tag), seconds, "sendrecv")
        except BaseException:
            self._post.cancel_request(request)
            raise
        self._post.finish_request(request, seconds, "sendrecv", deadline)
        target.store()

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> None:
        """Copy x on rank src into y on rank dst, whatever strides either has; only those two need call it.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.copy(np.arange(6).reshape(2, 3).T, None, src=0, dst=1)
        >>> y = np.zeros(12, int); two.copy(None, y[::2], src=0, dst=1); y
        array([0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0])
        >>> one.close(); two.close()
        """
        src, dst = check_rank(src, self._size, "src"), check_rank(dst, self._size, "dst")
        seconds = self._seconds(timeout)
        if self._rank == src == dst:
            _copy_here(x, y)
        elif self._rank == src:
            source = view(x, writable=False)
            self._post.send(raw(source.load()), dst, copy_tag(source.dtype), seconds, "copy")
        elif self._rank == dst:
            target = view(y, writable=True)
            request = self._post.post_request(raw(target.flat), src, copy_tag(target.dtype))
            self._post.finish_request(request, seconds, "copy")
            target.store()

    def _seconds(self, timeout: float | None) -> float:
        return bounded(timeout) or self._timeout

    def _peer(self, rank: int) -> int:
        number = check_rank(rank, self._size)
        if number == self._rank:
            raise InvalidRank(
                f"rank {number} is this rank itself: there is nobody to talk to", rank=number, peer=number
            )
        return number


def copy_tag(dtype: DType) -> int:
    """The tag of copies of this type: users' tags are not negative."""
    return -dtype.code


def _copy_here(x: Any, y: Any) -> None:
    source, target = view(x, writable=False), view(y, writable=True)
    if source.dtype != target.dtype or source.flat.size != target.flat.size:
        raise ArrayError(f"{arrays.describe(source.array)} does not fit {arrays.describe(target.array)}")
    target.flat[:] = source.load().copy()
    target.store()


def checked_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
        raise InvalidSize(f"tag {tag!r} is not a number from 0 to 2**62 - 1")
    return int(tag)
