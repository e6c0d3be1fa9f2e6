"""Measure how many members one coordinator can serve.

    python benchmarks/coordinator.py                                    # 5,000 members on 200 hosts, for 30 seconds
    python benchmarks/coordinator.py --members 20000 --hosts 800 --seconds 300
    python benchmarks/coordinator.py --tls                              # with a certificate for each host
    python benchmarks/coordinator.py --strangers 170                    # under attack by unauthenticated connections

Many hosts send one heartbeat per second, and each heartbeat is timed from the call to the answer. The coordinator is
`gradwire coordinator` in its own process, started with a journal in which all members are already registered. Each host
has its own stream, as a launcher has, and four processes simulate all hosts. With --strangers, unauthenticated
connections each begin eight calls and never send a request. A connection that the coordinator closes connects again.
The exit code is 1 if a member was evicted, if the 99th percentile exceeds 100 ms, or if the memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

from h2.connection import H2Connection

from gradwire.membership import Member
from gradwire.membership.client.session import CoordinatorSession
from gradwire.membership.coordinator.call_rules import CallRules
from gradwire.membership.coordinator.journal import Journal
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.endpoints import split
from gradwire.membership.types import Claim
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security import certificates
from gradwire.security.credentials import Credentials

JOB = "benchmark"
TOKEN = "the secret of this benchmark"
SIMULATORS = 4  # processes that simulate the hosts
LIMIT = 0.1  # seconds; for the 99th percentile
GROWTH = 8.0  # MiB by which the coordinator may grow in the second half
CALLS = 8  # begun on each unauthenticated connection
WARM_UP = 3  # heartbeats of each host that are not counted, because all hosts connect at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=5000, help="number of members (default: 5000)")
    parser.add_argument("--hosts", type=int, default=200, help="number of hosts (default: 200)")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration (default: 30)")
    parser.add_argument("--tls", action="store_true", help="give each host a certificate")
    parser.add_argument("--strangers", type=int, default=0, help="unauthenticated connections (default: 0)")
    parser.add_argument("--attack", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--simulate", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.strangers)
    if options.simulate:
        folder, first, last = options.simulate
        print("ready", flush=True)
        simulate_hosts(sys.stdin.readline().strip(), range(int(first), int(last)), Path(folder), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run_benchmark(Path(folder), options))


def names(host: int, options: argparse.Namespace) -> list[str]:
    return [f"host-{host}/{worker}" for worker in range(options.members // options.hosts)]


def run_benchmark(folder: Path, options: argparse.Namespace) -> int:
    members = [name for host in range(options.hosts) for name in names(host, options)]
    write(folder / "journal", members)
    if options.tls:
        certificates.make(folder, JOB, [f"host-{host}" for host in range(options.hosts)], ["coordinator"])
    with contextlib.ExitStack() as ending:
        me = [sys.executable, __file__, *sys.argv[1:], "--simulate", str(folder)]
        simulators = [start([*me, *map(str, part)], ending) for part in parts(options.hosts)]
        for simulator in simulators:
            first_line(simulator)  # start the simulators first: members without heartbeats are soon evicted
        size = str(len(members))
        command = [sys.executable, "-m", "gradwire", "coordinator", "--quiet", "--journal", str(folder / "journal")]
        if options.tls:
            names_of_files = {"--tls-ca": "ca.pem", "--tls-cert": "coordinator.pem", "--tls-key": "coordinator.key"}
            command += [word for option, file in names_of_files.items() for word in (option, str(folder / file))]
        coordinator = start([*command, "--size", size, "--min", "1", "--max", size], ending)
        address = first_line(coordinator).partition(" at ")[2].split()[0]
        print(f"{size} members on {options.hosts} hosts at 1 Hz, for {options.seconds:g} s")
        if options.strangers:
            first_line(start([sys.executable, __file__, *sys.argv[1:], "--attack", address], ending))
        for simulator in simulators:
            print(address, file=simulator.stdin, flush=True)
        memory = watch(coordinator.pid, simulators)
        return report([json.loads(first_line(simulator)) for simulator in simulators], memory)


def start(command: list[str], ending: contextlib.ExitStack) -> subprocess.Popen[str]:
    environ = {**os.environ, "GRADWIRE_TOKEN": TOKEN}
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ending.enter_context(process)
    ending.callback(process.terminate)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a process of the benchmark ended too early")
    return line


def write(path: Path, members: list[str]) -> None:
    """Write a journal in which all members are registered."""
    membership = Membership(JOB, os.urandom(16), start=len(members), minimum=1, maximum=len(members))
    for rank, name in enumerate(members):
        member = Member(name, rank, name.partition("/")[0], "host", rank, "127.0.0.1:1")
        membership.register(Claim(member, None, None, os.urandom(16)), 0.0)
    rules = CallRules(membership, lambda changes, snapshot: None, lambda changes: None)
    with Journal(path) as journal:
        journal.save(membership.changes(), rules.snapshot())


def parts(hosts: int) -> list[tuple[int, int]]:
    edges = [hosts * simulator // SIMULATORS for simulator in range(SIMULATORS + 1)]
    return list(itertools.pairwise(edges))


def watch(pid: int, simulators: list[subprocess.Popen[str]]) -> list[float]:
    """Return the coordinator's memory in MiB for each second until the simulators report."""
    memory: list[float] = []
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    used, since = 0.0, time.monotonic()
    outputs = [simulator.stdout.fileno() for simulator in simulators if simulator.stdout is not None]
    while len(select.select(outputs, [], [], 0.0)[0]) < len(outputs):
        time.sleep(1.0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        memory.append(int(fields[21]) * page / 2**20)
        if len(memory) % 10 == 0:
            busy, now = (int(fields[11]) + int(fields[12])) / tick, time.monotonic()
            load = f"{100 * (busy - used) / (now - since):.0f} % of a core"
            print(f"  {len(memory):4d} s: {memory[-1]:.1f} MiB, {fields[17]} threads, {load}", flush=True)
            used, since = busy, now
    return memory


def report(reports: list[tuple[list[float], int]], memory: list[float]) -> int:
    times = sorted(seconds for part, _ in reports for seconds in part)
    evicted = sum(count for _, count in reports)
    at = {share: times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99, 0.999)}
    growth = memory[-1] - memory[len(memory) // 2]
    print(
        f"{len(times)} heartbeats: p50 {1e3 * at[0.5]:.1f} ms, p99 {1e3 * at[0.99]:.1f} ms, "
        f"p99.9 {1e3 * at[0.999]:.1f} ms, worst {1e3 * times[-1]:.1f} ms; {evicted} evicted"
    )
    print(f"memory {memory[len(memory) // 2]:.1f} MiB half-way, {memory[-1]:.1f} MiB at the end")
    return int(bool(evicted) or at[0.99] > LIMIT or growth > GROWTH)


def attack(address: str, strangers: int) -> NoReturn:
    """Hold unauthenticated connections until this process is ended."""
    held = [begin_calls(address) for _ in range(strangers)]
    print("ready", flush=True)
    while True:
        for sock in select.select(held, [], [])[0]:
            with contextlib.suppress(OSError):
                if sock.recv(1 << 16):
                    continue
            sock.close()
            held[held.index(sock)] = begin_calls(address)


def begin_calls(address: str) -> socket.socket:
    sock, http = socket.create_connection(split(address)), H2Connection()
    http.initiate_connection()
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/gradwire.membership.v1.Membership/RegisterWorker",
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    for stream in range(1, 2 * CALLS, 2):
        http.send_headers(stream, list(headers.items()))
    sock.sendall(http.data_to_send())
    return sock


def simulate_hosts(address: str, hosts: range, folder: Path, options: argparse.Namespace) -> None:
    times: list[float] = []
    evicted: list[int] = []

    def host(number: int) -> None:
        time.sleep((number % 100) / 100)  # spread the hosts' heartbeats over the second
        body = pb.HeartbeatRequest(ids=names(number, options)).SerializeToString()
        credentials = None
        if options.tls:
            credentials = Credentials(folder / "ca.pem", folder / f"host-{number}.pem", folder / f"host-{number}.key")
        with CoordinatorSession(address, TOKEN.encode(), 60.0, credentials=credentials) as coordinator:
            ask = coordinator.stream("Heartbeats")
            due = begin = time.monotonic()
            count = 0
            while due < begin + options.seconds:
                time.sleep(max(0.0, due - time.monotonic()))
                start = time.perf_counter()
                news = pb.News.FromString(ask(body, 60.0))
                count += 1
                if count > WARM_UP:
                    times.append(time.perf_counter() - start)
                due += 1.0
        evicted.append(len(news.evicted))

    threads = [threading.Thread(target=host, args=(number,)) for number in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(evicted) < len(hosts):
        raise SystemExit("a simulated host failed")
    print(json.dumps([times, max(evicted)]))


if __name__ == "__main__":
    main()
