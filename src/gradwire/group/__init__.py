"""Group: the ranks that talk, and everything they can say to each other.

group           Group itself: who, beginning and end, collectives, streams, subgroups
memory          arrays in memory that ranks share
messaging       send, recv, sendrecv and copy, outside the order of the collectives
"""

from __future__ import annotations

from gradwire.group.group import WORLD, Group
from gradwire.operations import Capabilities

__all__ = ["WORLD", "Capabilities", "Group"]
