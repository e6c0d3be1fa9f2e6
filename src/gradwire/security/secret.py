"""Finds the job's secret: in `GRADWIRE_TOKEN`, or on loopback in a file that only this user can read.

Thanks to that file, the processes of one user on one machine need no configuration. A job that spans machines needs a
token, because no file is known to be both shared by its machines and private to the user.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from gradwire.errors import ConfigError

TOKEN = "GRADWIRE_TOKEN"
SHORTEST_TOKEN = 16  # characters; a shorter one can be guessed from one recorded proof
_LONGEST_FILE = 4096


def new_token() -> str:
    """Return a new random token, printable and safe in an environment variable."""
    return secrets.token_urlsafe(32)


def job_secret(environ: Mapping[str, str], loopback: bool) -> bytes:
    """Return the secret that all processes of the job hold. `loopback`: all of them are on this machine."""
    token = environ.get(TOKEN)
    if token is not None:
        return _checked_token(token)
    if not loopback:
        raise ConfigError(
            f"a job on several machines needs a secret: set {TOKEN} to the same value for all its "
            'processes, for example the output of: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    path = secret_path(environ)
    try:
        return _read(path) or _create(path)
    except OSError as error:
        raise ConfigError(f"cannot store the job secret in {path}: {error.strerror}; set {TOKEN} instead") from error


def with_token(environ: Mapping[str, str], file: Path | None) -> Mapping[str, str]:
    """Return the environment with the token that a file holds. If `file` is None, it is unchanged."""
    if file is None:
        return environ
    try:
        with file.open("rb") as opened:
            content = opened.read(_LONGEST_FILE + 1)
        token = content.decode().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the token in {file}: {error}") from error
    if len(content) > _LONGEST_FILE:
        raise ConfigError(f"the token in {file} is too long: at most {_LONGEST_FILE} bytes are allowed")
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token in {file} has {len(token)} characters and needs at least {SHORTEST_TOKEN}")
    return {**environ, TOKEN: token}


def derive(secret: bytes, purpose: str, *context: bytes) -> bytes:
    """Return a key (or proof) of 32 bytes for one purpose.

    The parts are length-prefixed, so two different lists of parts never give the same input.
    """
    parts = (purpose.encode(), *context)
    return hmac.digest(secret, b"".join(piece for part in parts for piece in (len(part).to_bytes(8), part)), "sha256")


def secret_path(environ: Mapping[str, str]) -> Path:
    """Return the path of this user's secret: in the session's private directory if it exists, else in the home."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own_directory(runtime):
        return Path(runtime, "gradwire", "secret")
    home = environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    return Path(home, ".config", "gradwire", "secret")


def _checked_token(token: str) -> bytes:
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{TOKEN} has {len(token)} characters and needs at least {SHORTEST_TOKEN}")
    return token.encode("utf-8", "surrogateescape")


def _is_own_directory(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and os.access(path, os.W_OK)


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the job secret {path} is not a regular file; remove it")
        if status.st_uid != os.geteuid():
            raise ConfigError(f"the job secret {path} belongs to user id {status.st_uid}, not to this user; remove it")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"other users can access the job secret {path}: chmod 600 it, or remove it to get a new one"
            )
        content = file.read(_LONGEST_FILE + 1).strip()
    if not SHORTEST_TOKEN <= len(content) <= _LONGEST_FILE:
        raise ConfigError(
            f"the job secret {path} has {len(content)} bytes, not {SHORTEST_TOKEN} to {_LONGEST_FILE}; remove it"
        )
    return content


def _create(path: Path) -> bytes:
    """Create the secret and return it.

    The complete file is written under another name and then linked into place. If several processes do this at the same
    time, one of them succeeds and all of them read its file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(new_token() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    secret = _read(path)
    if secret is None:
        raise ConfigError(f"the job secret {path} was removed while it was being created; start again")
    return secret
