"""What a training loop needs around the collectives; no framework is imported here.

`gradients` averages gradients in `buckets` while backward runs, with `compression` in fewer bytes; `zero` spreads the
optimizer's state over the ranks; `contract` checks that replicas are the same; `elastic` goes on when ranks are lost,
and `fence` orders the writers of checkpoints; `sampler` says which samples a rank sees.
"""

from __future__ import annotations

from gradwire.training.sampler import Sampler

__all__ = ["Sampler"]
