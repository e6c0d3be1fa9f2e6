"""torch's DistributedDataParallel on groups of ours: gradients are views of its buckets unless a script says otherwise.

torch leaves `gradient_as_bucket_view` off, for programs that keep a gradient from one step to the next. It then holds
all gradients twice, and copies them into buckets and back, which here takes longer than the exchange. Scripts that only
name our backend should not have to know of it: what they do not say is True.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

OPTION = "gradient_as_bucket_view"


def prefer_bucket_views(kind: type) -> None:
    """From now on, in this process, for models whose process group is of this kind; again is harmless."""
    plain = DistributedDataParallel.__init__
    signature = inspect.signature(plain)
    if OPTION not in signature.parameters or getattr(plain, "prefers_bucket_views", False):
        return

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **named: Any) -> None:
        said = signature.bind_partial(self, *args, **named).arguments
        if OPTION not in said and isinstance(_group(said), kind):
            named[OPTION] = True
        plain(self, *args, **named)

    init.prefers_bucket_views = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init


def _group(said: dict[str, Any]) -> Any:
    """The process group that the model will have."""
    mesh = said.get("device_mesh")
    if mesh is not None:
        return mesh.get_group() if mesh.ndim == 1 else None
    return said.get("process_group") or dist.group.WORLD
