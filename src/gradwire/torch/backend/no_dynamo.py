"""Keeps torch.compile from tracing the code of a process group.

`torch.compiler.disable` does that too, but it imports the whole compiler at once and adds a wrapper to each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the function, and all that it calls
except ImportError:  # an older torch, which does not trace this code
    set_code_exec_strategy = None  # type: ignore[assignment]

Call = TypeVar("Call", bound=Callable[..., Any])


def no_dynamo(call: Call) -> Call:
    """Mark a function that torch.compile must run without tracing it."""
    if set_code_exec_strategy is not None:
        set_code_exec_strategy(call.__code__, _SKIP)
    return call
