"""`Group`: what users call, and how its operations run in one order.

work                `Work`, the handle of a queued operation
plan_cache          schedules chosen by price and bound to this rank, the last ones used
call_order          tickets: the one order of a group's calls
progress_queue      queued operations and the thread that does them
group_links         the links between a group's ranks, and the executor that uses them
schedule_runner     carries out the schedules of a call
runner              runs a group's operations one at a time, in the program's order
point_to_point      send, recv, sendrecv and copy, outside that order
collective_calls    the collectives of a group, each declared once
stream              `Stream`: the same collectives, queued
group               `Group`
internals           `GroupInternals`: what other packages use of a group beyond its public calls
"""

from __future__ import annotations

from gradwire.group.group import WORLD, Group, collective_channel
from gradwire.operations import Capabilities

__all__ = ["WORLD", "Capabilities", "Group", "collective_channel"]
