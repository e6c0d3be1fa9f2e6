"""What a training loop needs around the collectives; it knows groups by their methods and no framework by name.

`sampler` says which samples a rank sees.
"""

from __future__ import annotations

from gradwire.training.sampler import Sampler

__all__ = ["Sampler"]
