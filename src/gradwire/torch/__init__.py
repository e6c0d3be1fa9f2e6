"""gradwire for PyTorch: thin adapters of its interfaces to groups and training.

    tensors     tensors as arrays, reduce ops as ours
    works       torch's handles of running collectives
    mail        send and recv as torch's handles
    backend     the backend "gradwire" of torch.distributed: a process group on a Group
    meeting     how the ranks of a torch process group find each other, through its store
"""

from __future__ import annotations

from gradwire.torch import backend

__all__ = ["backend"]

backend.register()
