"""gradwire for PyTorch: `gw.torch.DistributedDataParallel`, and the backend "gradwire" of torch.distributed.

Loaded when `gw.torch` is first used; from then on torch knows `torch.distributed.init_process_group("gradwire")`.

    views            tensors as NumPy arrays, and back
    model_guard      notices when a wrapped model has been changed
    buffers          what a model holds beside its parameters
    gradient_views   gradients as views of buckets
    ready_order      the order in which gradients become complete
    reducer          hooks in backward: gradients into buckets, buckets reduced
    join             ranks that run out of data before others
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
    text = "gw.torch needs PyTorch, which is not installed: pip install torch"
    raise ModuleNotFoundError(text, name="torch") from None

import typing_extensions  # torch needs it

from gradwire.liveness.call_log import count_as_inside
from gradwire.torch import backend
from gradwire.torch.ddp import DistributedDataParallel
from gradwire_autoload import register as _register

__all__ = ["DistributedDataParallel", "backend"]

for _inside in (os.path.dirname(_torch.__file__), typing_extensions.__file__, warnings.__file__):
    count_as_inside(_inside)  # errors name the line that called torch, part of which is called through the other two
_register()
