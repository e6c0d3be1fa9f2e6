"""Makes each `.grad` a view of a bucket: it is the memory that ranks exchange, so gradients are stored only once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import UnsupportedOp
from gradwire.host import malloc
from gradwire.torch.views import as_array, as_tensor, in_memory_order, laid_out_like
from gradwire.training.gradients import GradientSync


class GradientViews:
    """The view of each parameter's gradient in a bucket of a `GradientSync`, by the parameter's index."""

    def __init__(self, sync: GradientSync, parameters: Mapping[str, Any]) -> None:
        self._sync = sync
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._views: list[Any] = []
        self._layouts: list[Any] = []
        self.refresh()

    def refresh(self) -> None:
        """Make views of the current places in the buckets, and update each `.grad` that is a view of an old place."""
        old = self._views
        flat = [as_tensor(self._sync.gradients[name].reshape(-1)) for name in self._names]
        self._views = [laid_out_like(one, parameter) for one, parameter in zip(flat, self._parameters, strict=True)]
        self._layouts = [(view.dtype, view.shape, view.stride(), view.device) for view in self._views]
        for parameter, before, now in zip(self._parameters, old, self._views, strict=False):
            if parameter.grad is before:
                parameter.grad = now

    def place(self, index: int, parameter: Any) -> None:
        """Copy a parameter's gradient, which is not None, into its bucket, and make `.grad` the view of it."""
        view, gradient, name = self._views[index], parameter.grad, self._names[index]
        if gradient is view:
            self._sync.writer.mark_unchecked(name)
            return
        if gradient.requires_grad:
            raise UnsupportedOp(
                f"the gradient of {name!r} has its own autograd graph (create_graph=True), which gradwire cannot "
                "average. For a gradient penalty, use torch.autograd.grad, add the penalty to the loss, and call "
                "backward() once"
            )
        if gradient.layout != torch.strided:
            raise UnsupportedOp(
                f"the gradient of {name!r} is sparse: gradwire averages only dense gradients (use sparse=False)"
            )
        if not self._same_layout(index, gradient):
            with torch.no_grad():
                view.copy_(gradient)
            self._sync.writer.mark_unchecked(name)
        elif not self._sync.writer.copy_from(name, gradient.data_ptr()):
            self._sync.write(name, as_array(name, in_memory_order(gradient)).reshape(view.shape))
        malloc.about_to_free(gradient.nbytes)
        parameter.grad = view

    def _same_layout(self, index: int, gradient: Any) -> bool:
        """Return whether the gradient's bytes can be copied to its place as they are.

        They cannot if torch still has to conjugate or negate them, or if the gradient has no memory.
        """
        return (
            (gradient.dtype, gradient.shape, gradient.stride(), gradient.device) == self._layouts[index]
            and not (gradient.is_conj() or gradient.is_neg())
            and (gradient.data_ptr() != 0 or gradient.numel() == 0)
        )

    def place_all(self) -> None:
        """Copy each `.grad` into its bucket; write zeros where `.grad` is None."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._views[index].zero_()
            else:
                self.place(index, parameter)

    def set_missing(self) -> None:
        """Set `.grad` where it is None but another rank had a gradient in the last backward pass."""
        used = self._sync.used
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and self._names[index] in used and parameter.requires_grad:
                parameter.grad = self._views[index]

    def drop(self) -> None:
        """Set all gradients to None."""
        for parameter in self._parameters:
            parameter.grad = None
