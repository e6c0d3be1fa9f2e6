"""`PointToPoint`: sends messages between two ranks of a group, and receives them.

Messages are matched by peer and tag, outside of the order of the collectives.
"""

from __future__ import annotations

import time

import numpy as np

from gradwire.errors import InvalidSize
from gradwire.generation.message_format import OutgoingMessage
from gradwire.group.receiving import Receiver
from gradwire.group.sending import Sender

MAX_TAG = (1 << 62) - 1


class PointToPoint(Sender, Receiver):
    """Sends and receives the messages of one group. Ranks are the group's; `members` are their world ranks."""

    __slots__ = ()

    def exchange(
        self, message: OutgoingMessage, dst: int, target: memoryview, src: int, tag: int, timeout: float
    ) -> None:
        """Send a message to one rank and receive a message from another at the same time."""
        deadline = time.monotonic() + timeout
        request = self.post_request(target, src, tag)
        try:
            self.send(message, dst, tag, timeout, "sendrecv")
        except BaseException:
            self.cancel_request(request)
            raise
        self.finish_request(request, timeout, "sendrecv", deadline)


def checked_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
        raise InvalidSize(f"tag {tag!r} is not a number from 0 to 2**62 - 1")
    return int(tag)
