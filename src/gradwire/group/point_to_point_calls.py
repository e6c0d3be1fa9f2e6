"""The methods `send`, `recv`, `sendrecv` and `copy` of `Group`."""

from __future__ import annotations

from typing import Any

from gradwire import arrays
from gradwire.arrays import raw, view
from gradwire.errors import ArrayError, InvalidRank
from gradwire.group.point_to_point import PointToPoint, checked_tag, copy_tag
from gradwire.operations.types import check_rank


class PointToPointCalls:
    """The methods of `Group` that two ranks call without the other ranks."""

    def __init__(self, point_to_point: PointToPoint) -> None:
        self._point_to_point = point_to_point
        self._rank = point_to_point.rank
        self._size = len(point_to_point.members)

    def send(self, x: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send the bytes of x to another rank.

        Up to 64 KiB, the call copies x and returns; it waits only while too many earlier messages are unread. A longer
        message waits for the matching `recv`: if two ranks send long messages to each other, use `sendrecv`.

        Args:
            x: An array. Only its bytes travel: the receiver needs a buffer of the same number of bytes.
            dst: The rank that receives.
            tag: A number from 0 to 2**62 - 1. `recv` gets only messages with its own tag.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `dst`, or it is the calling rank.
            Timeout: The receiver did not call `recv` in time. The group stays usable, unless the receiver stopped
                reading in the middle of a message: that breaks the group on every rank.
            PeerLost: The receiver is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.arange(3), dst=1, tag=7)
        >>> x = np.zeros(3, int); two.recv(x, src=0, tag=7), x
        (0, array([0, 1, 2]))
        >>> one.close(); two.close()
        """
        peer = self._point_to_point.check_peer(dst)
        self._point_to_point.send(raw(view(x, writable=False).load()), peer, checked_tag(tag), self._seconds(timeout))

    def recv(self, x: Any, src: int | None = None, tag: int = 0, timeout: float | None = None) -> int:
        """Receive a message into x and return the rank of its sender.

        Messages of one sender with one tag arrive in the order in which they were sent.

        Args:
            x: A writable array with as many bytes as the message.
            src: The rank that sends. None means any rank.
            tag: The tag of the message.
            timeout: Seconds that the call may take. None means the group's timeout.

        Returns:
            The rank of the sender.

        Raises:
            SizeMismatch: The message and x differ in size. The message stays for a `recv` with a buffer that fits.
            ArrayError: x cannot be used (read-only, not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `src`, it is the calling rank, or the group has only one rank.
            Timeout: No message arrived in time. The call can be repeated; no message is lost.
            PeerLost: The sender is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> try: two.recv(np.zeros(3), timeout=0.01)
        ... except gw.Timeout: one.send(np.ones(3), dst=1)
        >>> x = np.zeros(3); two.recv(x), x
        (0, array([1., 1., 1.]))
        >>> one.close(); two.close()
        """
        source = None if src is None else self._point_to_point.check_peer(src)
        if self._size == 1:
            raise InvalidRank("the group has only one rank: no other rank can send a message", size=1)
        target = view(x, writable=True)
        request = self._point_to_point.post_request(raw(target.flat), source, checked_tag(tag))
        sender = self._point_to_point.finish_request(request, self._seconds(timeout))
        target.store()
        return sender

    def sendrecv(self, x: Any, y: Any, dst: int, src: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send x to one rank and receive y from another, or from the same one, at the same time.

        Unlike `send` followed by `recv`, this cannot deadlock, whatever the sizes.

        Args:
            x: The array to send.
            y: A writable array for the received message. It must not overlap x.
            dst: The rank that receives x.
            src: The rank whose message y receives.
            tag: The tag of both messages.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: An array cannot be used, or y overlaps x.
            InvalidRank: The group has no such rank, or it is the calling rank.
            SizeMismatch: The received message and y differ in size. The message is kept.
            Timeout: The call did not finish in time. `send` and `recv` describe the consequences.
            PeerLost: One of the two ranks is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.ones(3), dst=1)
        >>> x, y = np.zeros(3), np.zeros(3)
        >>> two.sendrecv(x, y, dst=0, src=0); y
        array([1., 1., 1.])
        >>> one.close(); two.close()
        """
        to, source = self._point_to_point.check_peer(dst), self._point_to_point.check_peer(src)
        seconds = self._seconds(timeout)
        given, target = view(x, writable=False), view(y, writable=True)
        if arrays.overlap(given, target):
            raise ArrayError("y overlaps x: the received data would overwrite x while x is sent")
        self._point_to_point.exchange(raw(given.load()), to, raw(target.flat), source, checked_tag(tag), seconds)
        target.store()

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> None:
        """Copy x on rank `src` into y on rank `dst`. Either array may be strided.

        Only these two ranks need to call it; on other ranks the call does nothing. Copies between two ranks arrive in
        order, and are never received by `recv`.

        Args:
            x: On rank `src`, the array to copy. Ignored on other ranks.
            y: On rank `dst`, a writable array with the dtype and number of elements of x. Ignored on other ranks.
            src: The rank that has x.
            dst: The rank that has y. It may be the same rank.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: An array cannot be used, or the dtypes differ.
            SizeMismatch: x and y, on two ranks, differ in size. The copy is kept for a call with a y that fits.
            InvalidRank: The group has no such rank.
            Timeout: The other rank did not call `copy` in time.
            PeerLost: The other rank is gone.

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
            self._point_to_point.send(raw(source.load()), dst, copy_tag(source.dtype), seconds, "copy")
        elif self._rank == dst:
            target = view(y, writable=True)
            request = self._point_to_point.post_request(raw(target.flat), src, copy_tag(target.dtype))
            self._point_to_point.finish_request(request, seconds, "copy")
            target.store()

    def _seconds(self, timeout: float | None) -> float:
        """Return the timeout of a call, or the group's timeout if the call has none."""
        raise NotImplementedError


def _copy_here(x: Any, y: Any) -> None:
    source, target = view(x, writable=False), view(y, writable=True)
    if source.dtype != target.dtype or source.flat.size != target.flat.size:
        raise ArrayError(f"{arrays.describe(source.array)} does not fit {arrays.describe(target.array)}")
    target.flat[:] = source.load().copy()
    target.store()
