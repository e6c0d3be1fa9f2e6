"""Certificates for tests, made once, for the members m0 to m7 of a job called "tests". m0 may be its coordinator."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from gradwire.security import certificates
from gradwire.security.credentials import Credentials

JOB = "tests"
MEMBERS = tuple(f"m{number}" for number in range(8))


@functools.cache
def folder() -> Path:
    """Return the folder with ca.pem, m0.pem, m0.key …"""
    path = Path(tempfile.mkdtemp(prefix="gradwire-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    certificates.make(path, JOB, MEMBERS, ["m0"])
    return path


@functools.cache
def credentials(member: str) -> Credentials:
    return files(folder(), member)


def files(where: Path, member: str) -> Credentials:
    return Credentials(where / "ca.pem", where / f"{member}.pem", where / f"{member}.key")


def variables(member: str) -> dict[str, str]:
    """Return the environment variables that name the files of a member."""
    paths = {"CA": "ca.pem", "CERT": f"{member}.pem", "KEY": f"{member}.key"}
    return {f"GRADWIRE_TLS_{name}": str(folder() / file) for name, file in paths.items()}
