"""gradwire for PyTorch. Importing it makes `torch.distributed.init_process_group("gradwire")` known to torch.

backend     the backend "gradwire" of torch.distributed
"""

from __future__ import annotations

from gradwire.torch import backend

__all__ = ["backend"]

backend.register()
