"""Configuration for tests of gw.torch: one torch thread, because all ranks share two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
