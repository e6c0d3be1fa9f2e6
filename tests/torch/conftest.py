"""For tests of gw.torch: ranks share two cores, and torch must not start a pool for each."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
