"""`Group`: the calls that users make, and how they run one at a time in one order.

work                  `Work`: the handle of a queued operation
plan_cache            the plans used most recently: schedules chosen by cost and bound to this rank
call_order            tickets that define the order of a group's calls
progress_queue        queued operations, and the thread that runs them
group_links           the links between a group's ranks, and the executor that uses them
schedule_runner       runs the schedules of a call
runner                runs a group's operations one at a time, in the program's order
message_endpoint      this rank as the end of messages between two ranks: peers, checks, errors
sending               sends messages
receiving             receives messages, and describes those that have arrived
point_to_point        messages between two ranks, outside of that order
delivery              the thread that completes messages for which no thread waits
message_works         the works of isend and irecv
copies                copies from one rank to another, made now or queued
point_to_point_calls  the calls of a group that send and receive messages
collective_calls      the collectives of a group
stream                `Stream`: the same collectives, queued
group                 `Group`
internals             `GroupInternals`: access for gradwire's other packages
"""

from __future__ import annotations

from gradwire.group.group import WORLD, Group, collective_channel
from gradwire.operations import Capabilities

__all__ = ["WORLD", "Capabilities", "Group", "collective_channel"]
