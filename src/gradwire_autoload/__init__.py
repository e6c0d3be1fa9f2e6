"""What torch runs of gradwire whenever it is imported, and gradwire.torch too: the name of a backend, and nothing else.

A package of its own, because importing anything of gradwire imports gradwire, which torch's users have not asked for.
Whatever went wrong here would make `import torch` fail, so nothing may.
"""

from __future__ import annotations

from typing import Any

NAME = "gradwire"


def register() -> None:
    """Tell torch of the backend, whose code is imported when a process group is made of it."""
    try:
        from torch.distributed import Backend, distributed_c10d

        if NAME not in Backend.backend_list:
            Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # From torch 2.15 on, torch attaches its flight recorder to the groups of all backends that are not in this
        # set. It needs a backend in C++, which a process group in Python has not: making the group would fail.
        not_recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        not_recorded.add(NAME)
    except Exception:  # torch without torch.distributed, or one that names things differently
        return


def _create(options: Any, backend_options: Any) -> Any:
    from gradwire.torch.backend.process_group import create

    return create(options, backend_options)
