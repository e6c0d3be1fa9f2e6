"""Detects, before each forward pass, whether a model was changed after it was wrapped."""

from __future__ import annotations

import operator
from typing import Any

import torch

from gradwire.errors import ConfigError

_WRAP_AGAIN = "create a new DistributedDataParallel after changing the model"


class ModelGuard:
    """Records the modules and parameters of a model, and checks whether new parameters need gradients."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._trained = frozenset(map(id, trainable(model).values()))
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._record()

    def _record(self) -> None:
        holders = [held for one in self._model.modules() for held in (one._parameters, one._modules)]
        self._held = [(held, list(held.values())) for held in holders]

    def check(self) -> None:
        """Raise `ConfigError` if a parameter was added or unfrozen since the model was wrapped."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name!r} was unfrozen after the model was wrapped, so its gradient is not averaged: {_WRAP_AGAIN}"
                )
        for held, known in self._held:
            if len(held) != len(known) or not all(map(operator.is_, held.values(), known)):
                self._check_parameters()
                return

    def _check_parameters(self) -> None:
        """Raise if a trainable parameter was added. Replacing modules without new trainable parameters is allowed."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise ConfigError(
                    f"{name!r} was added to the model after it was wrapped, so its gradient is not averaged: "
                    f"{_WRAP_AGAIN}"
                )
        self._record()


def trainable(model: Any) -> dict[str, Any]:
    """Return the parameters that require gradients, each once; raise `ConfigError` if there are none."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not found:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to average")
    for name, one in found.items():
        if isinstance(one, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name!r} has no shape yet: run the model once on some data before you wrap it")
    return found
