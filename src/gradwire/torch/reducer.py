"""Autograd hooks: copy each gradient into its bucket when it is computed, and reduce full buckets while backward runs.

One hook per parameter is not enough, for two reasons.

*When is backward over?* The autograd engine calls back at the end of a graph task, but reentrant checkpointing runs
tasks inside of tasks. So a hook on the model's output, which fires in the outermost task, requests the callback. This
hook also fires in `autograd.grad`, which accumulates no gradients. So the hook asks the engine which nodes it will run.

*When is a gradient complete?* A hook can fire twice in one backward pass, for example for a weight that is used in two
checkpointed parts. So the first backward pass overlaps nothing. It learns which hooks fire twice, and the order in
which gradients are completed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.arrays import Array
from gradwire.errors import ConfigError, NotFinite
from gradwire.group import Group
from gradwire.host import malloc
from gradwire.torch.gradient_views import GradientViews
from gradwire.torch.ready_order import ReadyOrder
from gradwire.torch.views import as_array, tensors_in
from gradwire.training.communicator import Communicator
from gradwire.training.gradients import GradientSync


def _no_reference() -> None:
    """Return None, as a weak reference to a deleted object does."""


# The reducer of each parameter. A parameter has only one: two reducers would overwrite each other's buckets.
_OWNERS = WeakTensorKeyDictionary()
# For each group, the reducer that began first in the current backward pass. Only this one overlaps: the order in which
# the buckets of two models become complete can differ between ranks, and the group needs one order.
_FIRST: weakref.WeakKeyDictionary[Communicator, Callable[[], Reducer | None]] = weakref.WeakKeyDictionary()


class Reducer:
    """Averages the gradients of some parameters over all ranks in each backward pass."""

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, Any],
        after: Callable[[bool], None],
        overlap: bool,
        **options: Any,
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._after = after  # called at the end of a backward pass, with whether this rank had data
        self._overlap = overlap
        self.enabled = True
        self.uneven = False  # whether ranks may have no data; then the ranks exchange weights in each backward pass
        self.weight: float | None = None  # of the next backward pass
        like: dict[str, Array] = {name: as_array(name, one) for name, one in parameters.items()}
        self.sync = GradientSync(group, like, **options)
        self._views = GradientViews(self.sync, parameters)
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in self._parameters]
        self._order = ReadyOrder(self._names)
        self._changed = [False] * len(self._names)  # per parameter: whether .grad changed since the last exchange
        self._leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # leaf outputs with a hook
        self._callback: Callable[[], Any] = _no_reference  # weak reference to the callback at the end of backward
        self._hooks: list[Any] = []
        self.retire = weakref.finalize(self, _remove, self._hooks)
        """Remove the hooks, because another reducer has taken over the parameters."""
        self.retire.atexit = False
        self._reset()

    def attach(self) -> None:
        """Register hooks for all parameters, and retire the reducers that had them before.

        The hooks are on the nodes that accumulate gradients, not on the tensors: so they run after all of a user's
        hooks.
        """
        reference = weakref.ref(self)  # a strong reference in a hook would keep the model alive
        for parameter in self._parameters:
            former = _OWNERS.get(parameter, _no_reference)()
            if former is not None:
                former.retire()
            _OWNERS[parameter] = reference
        for index, node in enumerate(self._nodes):
            self._hooks.append(node.register_hook(partial(_accumulated, reference, index)))

    @property
    def retired(self) -> bool:
        """Whether another reducer has taken over some of these parameters."""
        return not self.retire.alive

    @property
    def _interrupted(self) -> bool:
        """Whether the last backward pass ended without the callback: an error has interrupted it."""
        return self._busy and self._callback() is None

    def _reset(self) -> None:
        self._busy = False
        self._first = True  # whether this reducer began first in this backward pass, of all reducers of the group
        self._done = [False] * len(self._names)  # per parameter: whether `ready` was called in this backward pass

    def rebind(self, group: Group) -> None:
        """Continue in another generation, without gradients: the step that computed them is repeated."""
        self._views.drop()
        self.sync.rebind(group)
        self._changed = [False] * len(self._names)
        self._order.learn_again()
        self._reset()
        self.agree()

    def agree(self) -> None:
        """Check that all ranks have the same gradients, and agree on their order."""
        self.sync.agree()
        self._views.refresh()

    # -- a backward begins --------------------------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Add hooks to the model's output that detect the beginning of a backward pass."""
        reference = weakref.ref(self)
        for tensor in tensors_in(output):
            if not tensor.requires_grad or (tensor.is_leaf and self._leaves.get(id(tensor)) is tensor):
                continue
            if tensor.is_leaf:  # a leaf keeps its hook after backward, so it must not get a second one
                self._leaves[id(tensor)] = tensor
            tensor.register_hook(partial(_reached, reference))

    def _reach(self) -> None:
        """Begin a backward pass when it reaches an output, unless it accumulates no gradients."""
        self.discard_interrupted()
        if self.enabled and not self._busy and _accumulates(self._nodes):
            self._begin()

    def _begin(self) -> None:
        self._busy = True
        if self._order.is_learning:
            self._order.begin()
        callback = partial(_ended, weakref.ref(self))
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        first = _FIRST.get(self.sync.group, _no_reference)()
        self._first = first is None or first is self or not first._busy or first._interrupted
        if self._first:
            _FIRST[self.sync.group] = weakref.ref(self)
        if self.weight is None and self.uneven:
            self.weight = 1.0
        if self.weight is not None and self._first:
            self.sync.begin(self.weight)

    def discard_interrupted(self) -> None:
        """Discard a backward pass that an error has interrupted; raise `ConfigError` if it had begun an exchange."""
        if not self._interrupted:
            return
        if self.sync.under_way:
            raise ConfigError(
                "an error interrupted the last backward pass while gradients were being exchanged, and the other ranks "
                "wait for the rest of them. End this process, so that the other ranks get an error"
            )
        self.sync.begin()
        self._reset()

    def _accumulate(self, index: int) -> None:
        """Handle a gradient that backward has computed, or added to."""
        parameter = self._parameters[index]
        if parameter.grad is None:  # another hook has removed it
            return
        self.discard_interrupted()
        if self.enabled and not self._busy:
            self._begin()
        if self._done[index]:
            raise ConfigError(
                f"backward added to the gradient of {self._names[index]!r} after its exchange had begun. For this "
                "model, use DistributedDataParallel(…, overlap=False)"
            )
        self._views.place(index, parameter)
        self._changed[index] = True
        if not self.enabled:
            return
        if self._order.is_learning:
            self._order.see(index)
        elif self._overlap and self._first and index not in self._order.twice:
            self._done[index] = True
            self.sync.ready(self._names[index])

    # -- a backward ends ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Exchange the remaining gradients. Afterwards, all ranks have the same gradients."""
        try:
            if self.weight is not None and not self._first:
                self.sync.begin(self.weight)
            self._complete()
            try:
                self.sync.finish()
            except NotFinite:  # raised on all ranks; a program that skips this step still needs equal buffers
                self._after(self.weight != 0)
                raise
            self._views.set_missing()
            self._changed = [False] * len(self._names)
            self._after(self.weight != 0)
            if self._order.end(self.sync):
                self._views.refresh()
        finally:
            self.weight = None
            self._reset()
            malloc.between_passes()

    def _complete(self) -> None:
        """Call `ready` for all remaining gradients.

        A gradient that did not change since the last exchange takes part too, because other ranks may have changed
        theirs.
        """
        for index, parameter in enumerate(self._parameters):
            if self._done[index] or parameter.grad is None:
                continue
            self._views.place(index, parameter)
            self.sync.ready(self._names[index], used=self._changed[index], beside=False)

    def sit_out(self) -> bool:
        """Take part in an exchange without data. Return False if no rank had data."""
        self.weight = 0.0
        self.sync.begin(0.0)
        self.end()
        return self.sync.total_weight > 0

    def clip(self, max_norm: float) -> float:
        """Scale the current values of `.grad` so that their norm is at most `max_norm`; return the norm before.

        The program may have replaced `.grad` since backward, so all gradients are copied into their buckets first.
        """
        self._views.place_all()
        return self.sync.clip(max_norm)


# The hooks hold only a weak reference to their reducer.


def _accumulated(reference: weakref.ref[Reducer], index: int, *_: Any) -> None:
    if (reducer := reference()) is not None:
        reducer._accumulate(index)


def _reached(reference: weakref.ref[Reducer], _: Any) -> None:
    if (reducer := reference()) is not None:
        reducer._reach()


def _ended(reference: weakref.ref[Reducer]) -> None:
    if (reducer := reference()) is not None:
        reducer.end()


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _accumulates(parameters: list[Any]) -> bool:
    """Return whether the current backward pass accumulates gradients; `autograd.grad` does not.

    If the engine will not run the node of any parameter, the rank may have used none of them. Then the first other leaf
    decides.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, parameters)) or _runs_a_leaf(
            torch._C._current_autograd_node()
        )
    except RuntimeError:  # the engine raises this for a leaf that is an input of `autograd.grad`
        return False


def _runs_a_leaf(output: Any) -> bool:
    """Return whether the engine accumulates into the first leaf below this output; True if there is no leaf."""
    stack, known = [output], {output}
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            return bool(torch._C._will_engine_execute_node(node))
        following = [one for one, _ in node.next_functions if one is not None and one not in known]
        stack.extend(following)
        known.update(following)
    return True
