"""The `gradwire certs` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import tls_files
from support.launch_jobs import LONG


def certs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", "certs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG)


def test_certs_writes_authority_certificates_and_keys(tmp_path: Path) -> None:
    where = tmp_path / "certs"
    done = certs(str(where), "--job", "digits", "--member", "a", "--member", "b", "--days", "30")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{where}/ca.pem {where}/ca.key",
        f"{where}/a.pem {where}/a.key",
        f"{where}/b.pem {where}/b.key",
        f"# for job digits; keep {where}/ca.key on this machine",
        "# on b, for example:",
        "export GRADWIRE_TLS_CA=ca.pem GRADWIRE_TLS_CERT=b.pem GRADWIRE_TLS_KEY=b.key",
    ]
    assert tls_files.files(where, "a").job == "digits"
    failed = certs(str(where), "--job", "digits", "--member", "a/b")
    assert (failed.returncode, failed.stderr.startswith("Error: 'a/b' is not a valid name")) == (1, True)
