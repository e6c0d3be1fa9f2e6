"""gradwire for PyTorch: `gw.torch.DistributedDataParallel`, and the backend "gradwire" of torch.distributed.

This package is imported when `gw.torch` is first used. The import registers the backend, so that
`torch.distributed.init_process_group("gradwire")` works.

    views            tensors as NumPy arrays, and back
    model_guard      detects changes of a model after it was wrapped
    buffers          broadcasts a model's buffers
    gradient_views   makes `.grad` a view of a bucket
    ready_order      learns the order in which backward completes gradients
    reducer          autograd hooks: copy gradients into buckets, and reduce full buckets
    join             training when ranks have different numbers of batches
    ddp              `DistributedDataParallel`
    backend          torch.distributed's process groups on gradwire's groups
"""

from __future__ import annotations

import os
import warnings

try:
    import torch as _torch
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    text = (
        "gw.torch needs PyTorch, which is not installed. The CPU build suffices and saves gigabytes of CUDA packages: "
        "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    )
    raise ModuleNotFoundError(text, name="torch") from None

import typing_extensions  # always installed: torch depends on it

from gradwire.liveness.call_log import count_as_inside
from gradwire.torch import backend
from gradwire.torch.ddp import DistributedDataParallel
from gradwire_autoload import register as _register

__all__ = ["DistributedDataParallel", "backend"]

for _inside in (os.path.dirname(_torch.__file__), typing_extensions.__file__, warnings.__file__):
    # Errors name the user's line that called torch. Parts of torch are called through typing_extensions and warnings.
    count_as_inside(_inside)
_register()
