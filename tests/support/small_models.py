"""Small torch models for tests. A seed gives the same numbers on every rank and thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Batch = tuple[Any, Any]


def filled(model: Any, seed: int) -> Any:
    """Set the parameters of a model from a seed, and return it. All threads share torch's own generator."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.normal(0, 0.3, tuple(parameter.shape))))
    return model


def mlp(seed: int = 0, dtype: Any = torch.float64) -> Any:
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    return filled(nn.Sequential(*layers), seed).to(dtype)


def batch(seed: int, rank: int, samples: int = 5, dtype: Any = torch.float64) -> Batch:
    """Return the samples of a rank in a step."""
    random = np.random.default_rng([seed, rank])
    x, y = random.normal(size=(samples, 6)), random.normal(size=(samples, 3))
    return torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)


def loss(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def gradients(model: Any) -> dict[str, Any]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def weights(model: Any) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def mean_gradients(make: Callable[[], Any], size: int, backward: Callable[[Any, int], None]) -> dict[str, Any]:
    """Return the mean of the gradients of all ranks, each with its own model; None for unused parameters."""
    found = []
    for rank in range(size):
        model = make()
        backward(model, rank)
        found.append(gradients(model))
    means = {}
    for name in found[0]:
        there = [one[name] for one in found if one[name] is not None]
        means[name] = sum(there) / size if there else None
    return means


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, f"{name} has a gradient"
        else:
            assert found[name] is not None, f"{name} has no gradient"
            assert float((found[name] - value).abs().max()) <= tolerance, name


def assert_same_bits(of_ranks: list[dict[str, Any]]) -> None:
    for other in of_ranks[1:]:
        assert list(other) == list(of_ranks[0])
        for name, value in of_ranks[0].items():
            same = value is other[name] or torch.equal(value, other[name])
            assert same, f"{name} is not the same on all ranks"
