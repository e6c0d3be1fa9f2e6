"""Imports gRPC so that it prints nothing to stderr.

While a coordinator serves in a process, gRPC prints a line to stderr at every fork ("skipping fork() handlers"), and a
data loader forks a lot. What it prints is decided by a variable that it reads when it is imported.
"""

from __future__ import annotations

import os

_VERBOSITY = "GRPC_VERBOSITY"
_said = os.environ.get(_VERBOSITY)
os.environ.setdefault(_VERBOSITY, "ERROR")
try:
    import grpc
finally:
    if _said is None:
        del os.environ[_VERBOSITY]

__all__ = ["grpc"]
