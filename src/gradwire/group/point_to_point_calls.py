"""The point-to-point methods of `Group`: `send`, `recv`, `isend`, `irecv`, `probe`, `sendrecv` and `copy`."""

from __future__ import annotations

from typing import Any, overload

from gradwire import arrays
from gradwire.arrays import Array, raw, view
from gradwire.errors import ArrayError, InvalidRank
from gradwire.generation.message_format import OutgoingMessage
from gradwire.group.copies import Copies
from gradwire.group.message_works import MessageWorks
from gradwire.group.point_to_point import PointToPoint, checked_tag
from gradwire.group.receiving import Message
from gradwire.group.work import Work


class PointToPointCalls:
    """The methods of `Group` that two ranks call without the other ranks."""

    def __init__(self, point_to_point: PointToPoint) -> None:
        self._point_to_point = point_to_point
        self._message_works = MessageWorks(point_to_point)
        self._copies = Copies(point_to_point)
        self._rank = point_to_point.rank
        self._size = len(point_to_point.members)

    def send(self, x: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send the bytes of x to another rank.

        Up to 64 KiB, the call copies x and returns; it waits only while too many earlier messages are unread. A longer
        message waits for the matching `recv`: if two ranks send long messages to each other, use `sendrecv` or `isend`.

        Args:
            x: An array. A buffer of the receiver needs the same number of bytes, and may have another dtype or shape.
                For values that are no arrays, use `broadcast_value` or `all_gather_values`.
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
        message = OutgoingMessage.of(view(x, writable=False))
        self._point_to_point.send(message, peer, checked_tag(tag), self._seconds(timeout))

    @overload
    def recv(
        self, x: None = None, src: int | None = None, tag: int = 0, timeout: float | None = None
    ) -> tuple[Array, int]: ...

    @overload
    def recv(self, x: Any, src: int | None = None, tag: int = 0, timeout: float | None = None) -> int: ...

    def recv(
        self, x: Any = None, src: int | None = None, tag: int = 0, timeout: float | None = None
    ) -> int | tuple[Array, int]:
        """Receive a message into x, or into a new array.

        Messages of one sender with one tag arrive in the order in which they were sent.

        Args:
            x: A writable array with as many bytes as the message. None means a new array, with the dtype and shape of
                the array that was sent.
            src: The rank that sends. None means any rank.
            tag: The tag of the message.
            timeout: Seconds that the call may take. None means the group's timeout.

        Returns:
            The rank of the sender. Without x: the new array, and the rank of the sender.

        Raises:
            SizeMismatch: The message and x differ in size. The message stays for a `recv` with a buffer that fits.
            ArrayError: x cannot be used (read-only, not in CPU memory, unknown dtype), or there is no memory for a new
                array. The message stays for the next `recv`.
            InvalidRank: The group has no rank `src`, it is the calling rank, or the group has only one rank.
            Timeout: No message arrived in time. The call can be repeated; no message is lost.
            PeerLost: The sender is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> try: two.recv(np.zeros(3), timeout=0.01)
        ... except gw.Timeout: one.send(np.ones(3), dst=1)
        >>> x = np.zeros(3); two.recv(x), x
        (0, array([1., 1., 1.]))
        >>> one.send(np.eye(2), dst=1); two.recv()
        (array([[1., 0.],
               [0., 1.]]), 0)
        >>> one.close(); two.close()
        """
        source, number, seconds = self._source(src), checked_tag(tag), self._seconds(timeout)
        target = None if x is None else view(x, writable=True)
        request = self._point_to_point.post_request(None if target is None else raw(target.flat), source, number)
        sender = self._point_to_point.finish_request(request, seconds)
        if target is None:
            assert request.array is not None
            return request.array, sender
        target.store()
        return sender

    def isend(self, x: Any, dst: int, tag: int = 0) -> Work:
        """Begin to send the bytes of x to another rank, and return a `Work` at once.

        Do not change x until the work is done. The message is sent while the program continues. It keeps its place
        among the messages of `send` and `isend` to the same rank.

        Args:
            x: An array, as for `send`.
            dst: The rank that receives.
            tag: The tag of the message, as for `send`.

        Returns:
            A `Work` with the result None. It is done when x may be changed again. It stays pending while no `recv`
            matches, also after a `wait` that timed out. If the group is closed or broken, or the receiver is gone, the
            work fails.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `dst`, or it is the calling rank.
            PeerLost: The receiver is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> work = one.isend(np.ones(100_000), dst=1)
        >>> array, sender = two.recv()
        >>> work.wait(), array.shape, sender
        (None, (100000,), 0)
        >>> one.close(); two.close()
        """
        peer, number = self._point_to_point.check_peer(dst), checked_tag(tag)
        return self._message_works.send(view(x, writable=False), peer, number, self._seconds(None))

    def irecv(self, x: Any, src: int | None = None, tag: int = 0) -> Work:
        """Begin to receive a message into x, and return a `Work` at once.

        Do not read or change x until the work is done. Receives that match the same message get messages in the order
        of their calls.

        Args:
            x: A writable array with as many bytes as the message.
            src: The rank that sends. None means any rank.
            tag: The tag of the message.

        Returns:
            A `Work`. Its result is the rank of the sender. It stays pending until a message arrives, also after a
            `wait` that timed out. If the group is closed or broken, or the sender is gone, the work fails and x is not
            written any more. It fails with `SizeMismatch` if the message and x differ in size; the message is kept.

        Raises:
            ArrayError: x cannot be used (read-only, not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `src`, it is the calling rank, or the group has only one rank.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> x = np.zeros(3); work = two.irecv(x)
        >>> one.send(np.ones(3), dst=1); work.wait(), x
        (0, array([1., 1., 1.]))
        >>> one.close(); two.close()
        """
        source, number = self._source(src), checked_tag(tag)
        return self._message_works.receive(view(x, writable=True), source, number, self._seconds(None))

    def probe(self, src: int | None = None, tag: int = 0, timeout: float | None = None) -> Message:
        """Wait until a message can be received, and describe it without receiving it.

        The next `recv` of the same sender and tag gets this message, unless another thread receives it before. A
        message for which an `irecv` is pending is not found.

        Args:
            src: The rank that sends. None means any rank.
            tag: The tag of the message.
            timeout: Seconds that the call may take. None means the group's timeout.

        Returns:
            A `Message`: source, tag, nbytes, dtype and shape.

        Raises:
            InvalidRank: The group has no rank `src`, it is the calling rank, or the group has only one rank.
            Timeout: No message arrived in time. The group stays usable.
            PeerLost: The sender is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.ones((2, 3), "float32"), dst=1)
        >>> message = two.probe()
        >>> x = np.empty(message.shape, message.dtype); two.recv(x, message.source, message.tag)
        0
        >>> one.close(); two.close()
        """
        source, number = self._source(src), checked_tag(tag)
        return self._point_to_point.probe(source, number, self._seconds(timeout))

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
        message = OutgoingMessage.of(given)
        self._point_to_point.exchange(message, to, raw(target.flat), source, checked_tag(tag), seconds)
        target.store()

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> None:
        """Copy x on rank `src` into y on rank `dst`. Either array may be strided.

        Only these two ranks need to call it; on other ranks the call does nothing. Copies between two ranks arrive in
        order, and are never received by `recv`. If copies from `src` to `dst` are queued on a stream of this group, the
        call runs after them.

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
        self._copies.run_now(x, y, src, dst, self._seconds(timeout))

    def _source(self, src: int | None) -> int | None:
        """Return the rank that a receive names, or None; raise `InvalidRank` if no such rank can send a message."""
        source = None if src is None else self._point_to_point.check_peer(src)
        if self._size == 1:
            raise InvalidRank("the group has only one rank: no other rank can send a message", size=1)
        return source

    def _seconds(self, timeout: float | None) -> float:
        """Return the timeout of a call, or the group's timeout if the call has none."""
        raise NotImplementedError
