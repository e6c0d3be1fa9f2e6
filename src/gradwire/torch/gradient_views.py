"""The gradients of parameters as views of buckets: `.grad` is the memory that ranks exchange, so it is held once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import UnsupportedOp
from gradwire.host import malloc
from gradwire.torch.views import as_array, as_tensor, in_memory_order, laid_out_like
from gradwire.training.gradients import GradientSync


class GradientViews:
    """For each parameter, by its index, the view that its gradient has in a bucket of a `GradientSync`."""

    def __init__(self, sync: GradientSync, parameters: Mapping[str, Any]) -> None:
        self._sync = sync
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._views: list[Any] = []
        self._layouts: list[Any] = []
        self.look_up()

    def look_up(self) -> None:
        """Have the present places of gradients in buckets, and move gradients that lie in earlier ones along."""
        old = self._views
        flat = [as_tensor(self._sync.gradients[name].reshape(-1)) for name in self._names]
        self._views = [laid_out_like(one, parameter) for one, parameter in zip(flat, self._parameters, strict=True)]
        self._layouts = [(view.dtype, view.shape, view.stride(), view.device) for view in self._views]
        for parameter, before, now in zip(self._parameters, old, self._views, strict=False):
            if parameter.grad is before:
                parameter.grad = now

    def place(self, index: int, parameter: Any) -> None:
        """Let the gradient of a parameter, which is not None, live in its bucket."""
        view, gradient, name = self._views[index], parameter.grad, self._names[index]
        if gradient is view:
            self._sync.writer.mark_unchecked(name)
            return
        if gradient.requires_grad:
            raise UnsupportedOp(
                f"the gradient of {name!r} has a graph of its own (create_graph=True), which is not averaged: for a "
                "penalty on gradients use torch.autograd.grad, add it to the loss, and call backward() once"
            )
        if gradient.layout != torch.strided:
            raise UnsupportedOp(f"the gradient of {name!r} is sparse: gradwire averages dense ones (sparse=False)")
        if not self._lies_alike(index, gradient):
            with torch.no_grad():
                view.copy_(gradient)
            self._sync.writer.mark_unchecked(name)
        elif not self._sync.writer.copy_from(name, gradient.data_ptr()):
            self._sync.write(name, as_array(name, in_memory_order(gradient)).reshape(view.shape))
        malloc.about_to_free(gradient.nbytes)
        parameter.grad = view

    def _lies_alike(self, index: int, gradient: Any) -> bool:
        """Whether the bytes of a gradient are those of its place: not if torch has yet to conjugate or negate them, or
        has none."""
        return (
            (gradient.dtype, gradient.shape, gradient.stride(), gradient.device) == self._layouts[index]
            and not (gradient.is_conj() or gradient.is_neg())
            and (gradient.data_ptr() != 0 or gradient.numel() == 0)
        )

    def place_all(self) -> None:
        """Let what each `.grad` holds now live in its bucket; where there is none, zeros."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._views[index].zero_()
            else:
                self.place(index, parameter)

    def hand_out(self) -> None:
        """Gradients that only other ranks had in the last backward are there now."""
        used = self._sync.used
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and self._names[index] in used and parameter.requires_grad:
                parameter.grad = self._views[index]

    def drop(self) -> None:
        """Let the parameters have no gradients."""
        for parameter in self._parameters:
            parameter.grad = None
