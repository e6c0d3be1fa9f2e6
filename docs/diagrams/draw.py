"""Draws the diagrams of docs/architecture.md from the code: `python docs/diagrams/draw.py`, after the code has changed.

Names, numbers and lists are read from the code wherever the code has them. `--check` writes nothing, and fails if a
committed file is not what this script draws.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

from svg import LINE, SMALL_CHARACTER, Box, Canvas

import gradwire
from gradwire import errors, transports
from gradwire.collectives import algorithms
from gradwire.group import plan_cache
from gradwire.job import session_protocol
from gradwire.job.session_protocol import Register, Repeat, SetUp
from gradwire.liveness import detector, verdict
from gradwire.membership.types import Assembly, Outcome, Refusal, Waiting
from gradwire.wire import Header

HERE = Path(__file__).parent
ENTRY = re.compile(r"^ *(\w+) {2,}(\S.*)$", re.MULTILINE)
# Each band of layers begins with this one.
BANDS = {
    "errors": "Foundations",
    "collectives": "Data plane",
    "liveness": "Failure detection",
    "executors": "Execution",
    "group": "What users call",
    "membership": "Jobs",
    "training": "Training",
    "simulate": "Tools",
}
BAND_KINDS = {"What users call": "good", "Failure detection": "bad", "Data plane": "data", "Execution": "data"}


def module(name: str) -> str:
    """Return the name of a module as a diagram shows it; raise if there is no such module."""
    if importlib.util.find_spec(f"gradwire.{name}") is None:
        raise ValueError(f"a diagram shows gradwire.{name}, which does not exist")
    return name.replace(".", "/")


def listed(package: object) -> dict[str, str]:
    """Return the modules that the docstring of a package lists, each with what it is."""
    return dict(ENTRY.findall(package.__doc__ or ""))


def milliseconds(seconds: float) -> str:
    """Return a time as a diagram shows it, with a space at which lines do not break."""
    return f"{seconds * 1000:g}\u00a0ms" if seconds < 1 else f"{seconds:g}\u00a0s"


def layers() -> Canvas:
    """The layers, from the docstring of the package."""
    rows = listed(gradwire)
    missing = BANDS.keys() - rows.keys()
    if missing:
        raise ValueError(f"bands begin with layers that do not exist: {sorted(missing)}")
    bands: dict[str, list[str]] = {}
    for name in rows:
        if name in BANDS:
            band = bands[BANDS[name]] = []
        band.append(name)
    left, names_at, texts_at = 160, 172, 276
    right = texts_at + int(SMALL_CHARACTER * max(map(len, rows.values()))) + 10
    canvas = Canvas(right + 50, "The layers of gradwire", "Each layer imports only from the layers above it.")
    y = 16.0
    for title, names in bands.items():
        frame = Box(left, y, right - left, 24 * len(names) + 10)
        canvas.text(left - 12, frame.middle + 5, title, "title", anchor="end")
        canvas.frame(frame, BAND_KINDS.get(title, "plain"))
        for index, name in enumerate(names):
            baseline = y + 22 + 24 * index
            canvas.text(names_at, baseline, name, "code")
            canvas.text(texts_at, baseline, rows[name].replace("`", ""), "small")
        y = frame.bottom + 7
    canvas.arrow((right + 24, y - 10), (right + 24, 18))
    note = "The arrow shows the direction of imports: from a layer to the layers above it."
    canvas.text(left, y + 14, note, "small muted")
    return canvas


class Stage(NamedTuple):
    """One stage of a path: what happens in it, and the module that does it."""

    title: str
    text: str
    module: str = ""
    kind: str = "plain"


def column(canvas: Canvas, x: float, y: float, width: float, stages: Iterable[Stage]) -> list[Box]:
    """Draw stages below each other, each with an arrow to the next."""
    boxes: list[Box] = []
    for title, text, name, kind in stages:
        boxes.append(canvas.box(x, y, width, title, text, kind=kind, code=name and module(name)))
        y = boxes[-1].bottom + 24
    for above, below in pairwise(boxes):
        canvas.arrow((above.centre, above.bottom), (below.centre, below.y))
    return boxes


def call_path() -> Canvas:
    """The path of a call, from the program to the same bits on every rank."""
    canvas = Canvas(800, "The path of a call", "group.all_reduce(x), from the program to the same bits on all ranks.")
    boxes = column(canvas, 20, 16, 480, call_stages())
    call, first, send = boxes[0], boxes[1], boxes[-2]
    text = (
        "The native core makes repeated calls with the same kind of array by itself. It runs the cached plan at once."
    )
    code = module("executors.fast_path")
    fast = canvas.box(540, first.y, 240, "Fast path", text, kind="data", code=code)
    canvas.arrow((call.right, call.middle), (fast.centre, call.middle), (fast.centre, fast.y), kind="data")
    entry = send.y + 24
    canvas.arrow((fast.centre, fast.bottom), (fast.centre, entry), (send.right, entry), kind="data")
    text = "A header that does not match this rank's own call breaks the group before any payload is read."
    others = canvas.box(540, entry + 26, 240, "Other ranks", text, kind="bad")
    canvas.arrow((send.right, send.bottom - 20), (others.x, send.bottom - 20), both=True)
    return canvas


def call_stages() -> Iterator[Stage]:
    """What happens in a call that is not on the fast path."""
    known = ", ".join(algorithms("all_reduce"))
    header = ", ".join(field.name for field in fields(Header) if field.name in HEADER_SHOWN)
    links = ", ".join(name for name in listed(transports) if name in ("local", "shm", "tcp"))
    yield Stage("group.all_reduce(x)", "The program calls a collective.", "group.collective_calls", "good")
    text = "x becomes a typed view of its memory. Wrong arguments raise an error before anything is sent."
    yield Stage("Check and view", text, "operations.elementwise")
    text = "The call takes the next place in the group's one order. Calls of a stream run on the progress thread."
    yield Stage("Order", text, "group.runner")
    text = f"""The cheapest algorithm of {known}, by size, ranks and topology. Its schedule is proved, then bound to
        dtype and counts. The last {plan_cache.MAX_PLANS} plans are cached."""
    yield Stage("Plan", text, "group.plan_cache")
    yield Stage("Record", "The call gets a sequence number and a fingerprint of its arguments.", "liveness.call_log")
    text = """The native core runs the plan without the GIL, over shared memory and TCP. The Python executor gives the
        same bits over any link."""
    yield Stage("Execute", text, "executors.native", "data")
    text = f"Links: {links}. Each message begins with a header: {header}."
    yield Stage("Send", text, "transports.base", "data")
    yield Stage("Result", "x holds the same bits on every rank.", kind="good")


HEADER_SHOWN = ("job", "generation", "group", "sequence", "fingerprint")


def failure_path() -> Canvas:
    """The failure path: several causes, one way to one error on every rank."""
    canvas = Canvas(800, "The failure path", "Every cause breaks the group on all ranks with the same error.")
    canvas.text(20, 28, "What happens", "title")
    canvas.text(290, 28, "How a rank notices it", "title")
    y, spine, notices = 40.0, 766.0, []
    for cause, notice in causes().items():
        noticed = canvas.box(290, y, 450, "", notice)
        happened = canvas.box(20, y, 240, "", cause, kind="bad", height=noticed.height)
        canvas.arrow((happened.right, noticed.middle), (noticed.x, noticed.middle))
        canvas.arrow((noticed.right, noticed.middle), (spine, noticed.middle))
        notices.append(noticed)
        y = noticed.bottom + 10
    report = column(canvas, 110, y + 16, 580, failure_stages())[0]
    canvas.arrow((spine, notices[0].middle), (spine, report.middle), (report.right, report.middle), kind="bad")
    return canvas


def causes() -> dict[str, str]:
    """What can break a group, and how a rank notices it."""
    beat, local, starved, remote = map(
        milliseconds,
        (detector.HEARTBEAT_SECONDS, detector.CONFIRM_SECONDS, detector.STARVED_SECONDS, detector.PEER_SECONDS),
    )
    return {
        "A process dies": "The kernel reports it: a pidfd on the same host, a closed link between hosts.",
        "A process freezes, or the network is cut": (
            f"Its heartbeats stop; it sent one every {beat}. Limit on the same host: {local}, or {starved} if the "
            f"process waits for a core. Limit between hosts: {remote} by default."
        ),
        "Ranks call different things": "The fingerprint in a message header differs from this rank's own call.",
        "A rank does not arrive": "The timeout of the call ends on a waiting rank.",
        "A program gives up": (
            'The rank itself reports it: abort(), an exception that leaves "with group", or Ctrl-C.'
        ),
    }


def failure_stages() -> Iterator[Stage]:
    """What follows after a rank has noticed a failure."""
    raised = ", ".join(kind.__name__ for kind in errors.Broken.__subclasses__())
    window = milliseconds(verdict.DECISION_SECONDS)
    yield Stage("Report", "The rank sends its finding to all ranks over control links.", "liveness.control_protocol")
    text = f"""Each rank collects findings for {window}, then chooses one: the most serious, then the one that names the
        lowest rank. All ranks reach the same verdict."""
    yield Stage("Verdict", text, "liveness.verdict")
    yield Stage("Halt", "Every waiting thread of the rank wakes up.", "generation.failure_path")
    text = f"""Once the process no longer touches the arrays of the call, it raises the error: {raised}. The error names
        the culprit, the call and its line."""
    yield Stage("Raise", text, "errors", "bad")
    text = "In an elastic job, group.recover() or gw.elastic forms the next generation."
    yield Stage("Recover", text, "job.member_session", "good")


def generation_life() -> Canvas:
    """The life of a generation, as the session protocol and the coordinator's state machine have it."""
    drawn = {Register, SetUp, Repeat}, {Waiting, Refusal, Assembly}
    if drawn != (set(get_args(session_protocol.Request)), set(get_args(Outcome))):
        raise ValueError("the session protocol or the coordinator's answers have changed: draw them")
    canvas = Canvas(800, "The life of a generation", "How a member gets from one generation to the next.")
    within = milliseconds(session_protocol.SET_UP_SECONDS)
    ask = canvas.box(
        240,
        16,
        330,
        "Ask for the next generation",
        "The member sends the coordinator its id, its last generation and the members it could not reach.",
        code=Register.__name__,
    )
    answers = canvas.box(
        240,
        ask.bottom + 40,
        330,
        "The coordinator answers",
        "A state machine decides: requests and the time go in, answers come out.",
        kind="data",
        code=f"{Waiting.__name__} | {Refusal.__name__} | {Assembly.__name__}",
    )
    end = canvas.box(
        630,
        answers.y,
        150,
        "Refused",
        "Another job or version, or the work is done.",
        kind="bad",
        code=Refusal.__name__,
    )
    connect = canvas.box(
        240,
        answers.bottom + 40,
        330,
        "Connect",
        f"All members connect with each other and agree on the tuning table, shared memory and heartbeats; in an "
        f"elastic job within {within}.",
        code=SetUp.__name__,
    )
    work = canvas.box(
        240,
        connect.bottom + 40,
        330,
        "At work",
        "Collectives, steps, votes. Ranks are valid in this generation only.",
        kind="good",
    )
    broken = canvas.box(
        60, work.bottom + 50, 260, "Broken", "All ranks raise the same error, which names the culprit.", kind="bad"
    )
    joiners = canvas.box(
        350,
        work.bottom + 50,
        200,
        "Others wait to join",
        "The step in progress ends first.",
        kind="note",
        height=broken.height,
    )
    done = canvas.box(580, work.bottom + 50, 200, "Done", "The program closes the group.", height=broken.height)
    leave = canvas.box(
        60,
        broken.bottom + 40,
        490,
        "Leave the generation",
        "Its groups, streams and links end. Only an elastic job forms another generation.",
    )
    canvas.arrow((ask.centre, ask.bottom), (ask.centre, answers.y))
    canvas.arrow((answers.right, answers.middle), (end.x, answers.middle), kind="bad")
    waits = answers.right + 28
    canvas.arrow(
        (answers.right, answers.y + 12),
        (waits, answers.y + 12),
        (waits, ask.middle),
        (ask.right, ask.middle),
        dashed=True,
    )
    canvas.text(waits + 8, ask.middle + 5, f"{Waiting.__name__}: ask again", "small")
    canvas.arrow((answers.centre, answers.bottom), (connect.centre, connect.y), kind="good")
    canvas.text(connect.centre + 10, answers.bottom + 25, f"{Assembly.__name__}: the members, by rank", "small")
    canvas.arrow((connect.centre, connect.bottom), (work.centre, work.y), kind="good")
    canvas.text(work.centre + 10, connect.bottom + 25, "generation n begins", "small")
    canvas.arrow(
        (connect.x, connect.middle),
        (190, connect.middle),
        (190, ask.bottom - 14),
        (ask.x, ask.bottom - 14),
        kind="bad",
        dashed=True,
    )
    for index, line in enumerate((f"{Repeat.__name__}:", "a member", "did not", "connect")):
        canvas.text(182, connect.middle - 90 + LINE * index, line, "small", anchor="end")
    fork = work.bottom + 24
    for box in (broken, joiners, done):
        canvas.arrow((work.centre, work.bottom), (work.centre, fork), (box.centre, fork), (box.centre, box.y))
    for box in (broken, joiners):
        canvas.arrow((box.centre, box.bottom), (box.centre, leave.y))
    canvas.arrow((leave.x, leave.middle), (30, leave.middle), (30, ask.y + 18), (ask.x, ask.y + 18), kind="good")
    canvas.text(40, ask.y + 8, "generation n + 1", "small")
    return canvas


def processes() -> Canvas:
    """The processes and threads of an elastic job on two hosts."""
    canvas = Canvas(800, "Processes and threads", "An elastic job of four ranks on two hosts.")
    beat = milliseconds(detector.HEARTBEAT_SECONDS)
    coordinator = canvas.box(
        250,
        16,
        300,
        "Coordinator",
        "One process per job. It decides who is in the next generation, and writes a journal.",
        kind="data",
        code=module("membership.coordinator"),
    )
    hosts = []
    for index, x in enumerate((20.0, 420.0)):
        top = coordinator.bottom + 60
        frame = Box(x, top, 360, 312)
        canvas.frame(frame)
        canvas.text(x + 12, top + 22, f"Host {'ab'[index]}", "title")
        launcher = canvas.box(
            x + 14,
            top + 34,
            332,
            "Launcher",
            "gradwire run or join: starts the ranks and renews their leases at the coordinator.",
        )
        ranks = [
            canvas.box(
                x + 14 + 188 * number, launcher.bottom + 30, 144, f"Rank {2 * index + number}", THREADS, kind="good"
            )
            for number in range(2)
        ]
        for rank in ranks:
            canvas.arrow((rank.centre, launcher.bottom), (rank.centre, rank.y))
        canvas.arrow((ranks[0].right, ranks[0].middle), (ranks[1].x, ranks[1].middle), kind="data", both=True)
        edge, anchor = ((x + 14, "start"), (frame.right - 14, "end"))[index]
        canvas.text(edge, frame.bottom - 14, "on one host: shared memory", "small", anchor=anchor)
        canvas.arrow(
            (launcher.centre, launcher.y),
            (launcher.centre, coordinator.bottom + 26),
            (coordinator.centre + (-60, 60)[index], coordinator.bottom + 26),
            (coordinator.centre + (-60, 60)[index], coordinator.bottom),
        )
        hosts.append((frame, ranks))
    (first, left), (_, right) = hosts
    y = first.bottom + 22
    canvas.arrow(
        (left[1].centre, left[1].bottom),
        (left[1].centre, y),
        (right[0].centre, y),
        (right[0].centre, right[0].bottom),
        kind="data",
        both=True,
    )
    canvas.text(400, y + 20, "between hosts: TCP or TLS", "small", anchor="middle")
    canvas.text(
        20,
        first.bottom + 70,
        f"The heartbeat thread belongs to the native core. It sends one heartbeat every {beat}, "
        "also while Python is blocked.",
        "small muted",
    )
    return canvas


THREADS = ("program", "progress thread", "service thread", "heartbeat thread")
DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "layers": layers,
    "processes": processes,
    "call-path": call_path,
    "failure-path": failure_path,
    "generation-life": generation_life,
}


def main(arguments: list[str]) -> int:
    """Write the diagrams, or check them; the exit code."""
    stale = []
    for name, draw in DRAWINGS.items():
        file, picture = HERE / f"{name}.svg", draw().svg()
        if arguments == ["--check"]:
            if not file.exists() or file.read_text("utf-8") != picture:
                stale.append(file.name)
        else:
            file.write_text(picture, "utf-8")
    if stale:
        print(f"not what the code is today: {', '.join(stale)}; run python docs/diagrams/draw.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
