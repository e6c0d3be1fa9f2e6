"""Read the variables of Slurm's srun. Rank 0 runs on the step's first host; the port is derived from the step's id."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradwire.job.environments.launcher_settings import Found, Partial, derived_port, find, join

RANK = "SLURM_PROCID"
# Only processes of a step have this variable. SLURM_NTASKS is also set in a batch script, which is a single process.
SIZE = "SLURM_STEP_NUM_TASKS"
LOCAL_RANK = "SLURM_LOCALID"
JOB_ID = "SLURM_JOB_ID"
STEP_ID = "SLURM_STEP_ID"
HOSTS = "SLURM_STEP_NODELIST"
HOST_COUNT = "SLURM_STEP_NUM_NODES"
# Step numbers from here up stand for batch scripts, interactive shells and other single processes (slurm.h:
# SLURM_*_STEP).
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def detect(environ: Mapping[str, str]) -> Partial | None:
    """Return srun's settings, or None in a batch script, in an interactive shell or outside of Slurm."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    job, step = find(environ, JOB_ID), find(environ, STEP_ID)
    if not (rank and size and job and step) or _is_special(step.text):
        return None
    name = Found(f"slurm-{job.text}.{step.text}", f"{JOB_ID} and {STEP_ID}")
    hosts, count = find(environ, HOSTS), find(environ, HOST_COUNT)
    address, hint = None, ""
    if count and count.text == "1":
        address = Found(join("127.0.0.1", derived_port(name.text)), HOST_COUNT)
    elif hosts:
        address = Found(join(first_host(hosts.text), derived_port(name.text)), HOSTS)
    else:
        hint = f"{HOSTS} is not set, so the host of rank 0 is unknown"
    return Partial("Slurm", rank, size, find(environ, LOCAL_RANK), address, True, job=name, hint=hint)


def first_host(hosts: str) -> str:
    """Return the first host of a compressed list.

    >>> first_host("node[07-09,12],other")
    'node07'
    >>> first_host("rack1-[3,5]-gpu,rack2-1-gpu")
    'rack1-3-gpu'
    """
    first = re.split(r",(?![^\[]*\])", hosts, maxsplit=1)[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def _is_special(step: str) -> bool:
    return step.isdecimal() and int(step) >= FIRST_SPECIAL_STEP
