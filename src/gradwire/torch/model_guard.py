"""Notices, before each forward, when a wrapped model has been changed since it was wrapped."""

from __future__ import annotations

import operator
from typing import Any

import torch

from gradwire.errors import ConfigError

_ANEW = "make a new DistributedDataParallel after changing the model"


class ModelGuard:
    """The modules and parameters of a model, and which of them are trained."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._trained = frozenset(map(id, trained(model).values()))
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._look()

    def _look(self) -> None:
        holders = [held for one in self._model.modules() for held in (one._parameters, one._modules)]
        self._held = [(held, list(held.values())) for held in holders]

    def check(self) -> None:
        """Raise `ConfigError` if a parameter is trained that was not there, or was frozen."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name!r} was frozen when the model was wrapped, so nobody averages its gradient: {_ANEW}"
                )
        for held, known in self._held:
            if len(held) != len(known) or not all(map(operator.is_, held.values(), known)):
                self._look_closer()
                return

    def _look_closer(self) -> None:
        """Something was replaced: whatever is not trained may be."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise ConfigError(
                    f"{name!r} was put into the model after it was wrapped, so nobody averages its gradient: {_ANEW}"
                )
        self._look()


def trained(model: Any) -> dict[str, Any]:
    """The parameters to be trained, each once."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not found:
        raise ConfigError("the model has no parameter that is trained: nothing to keep in step")
    for name, one in found.items():
        if isinstance(one, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name!r} has no shape yet: run the model once on some data, then wrap it")
    return found
