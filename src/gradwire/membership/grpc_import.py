"""Imports gRPC so that it prints nothing to stderr.

While a coordinator serves in a process, gRPC prints a line to stderr at every fork ("skipping fork() handlers"), and
data loaders fork often. gRPC reads the environment variable that controls this only once, at its import.
"""

from __future__ import annotations

import os

_VERBOSITY = "GRPC_VERBOSITY"
_previous = os.environ.get(_VERBOSITY)
os.environ.setdefault(_VERBOSITY, "ERROR")
try:
    import grpc
finally:
    if _previous is None:
        del os.environ[_VERBOSITY]

__all__ = ["grpc"]
