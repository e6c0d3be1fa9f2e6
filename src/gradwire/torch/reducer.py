"""Hooks in backward: each gradient moves into its bucket as it appears, and full buckets travel while backward runs.

Two things make this more than a hook per parameter.

*When is backward over?* The engine calls back at the end of a graph task, but checkpointing of the reentrant kind runs
tasks inside of tasks. So the callback is asked for by a hook on the model's output, which fires in the outermost one.
Such a hook also fires in `autograd.grad`, where no gradient is accumulated: the engine is asked what it will run.

*When is a gradient complete?* A hook may fire twice in one backward: a weight that is used in two checkpointed parts.
The first backward therefore overlaps nothing. It learns who fires twice, and the order in which buckets get full.
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
from gradwire.training.gradients import GradientSync


def _nobody() -> None:
    """A weak reference to nothing."""


_OWNERS = WeakTensorKeyDictionary()  # whose each parameter is: two reducers would write over each other's buckets
# Who of a group's reducers began first in the backward that runs. The others overlap nothing: in which order buckets of
# two models get full depends on what a rank has used of them.
_FIRST: weakref.WeakKeyDictionary[Group, Callable[[], Reducer | None]] = weakref.WeakKeyDictionary()


class Reducer:
    """The gradients of some parameters, in step on all ranks at the end of each backward."""

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
        self._after = after  # what else is exchanged at the end of a backward; told whether there was data here
        self._overlap = overlap
        self.enabled = True
        self.uneven = False  # whether ranks may be without data: then weights are told in each backward
        self.weight: float | None = None  # of the next backward
        like: dict[str, Array] = {name: as_array(name, one) for name, one in parameters.items()}
        self.sync = GradientSync(group, like, **options)
        self._views = GradientViews(self.sync, parameters)
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in self._parameters]
        self._order = ReadyOrder(self._names)
        self._changed = [False] * len(self._names)  # since the last exchange
        self._leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # outputs that are watched
        self._callback: Callable[[], Any] = _nobody  # at the end of the backward that runs, as long as it runs
        self._hooks: list[Any] = []
        self.retire = weakref.finalize(self, _remove, self._hooks)
        """Let go of the parameters: another reducer has them."""
        self.retire.atexit = False
        self._forget()

    def take_over(self) -> None:
        """Hook the parameters; whoever had them before gives them up.

        The nodes that accumulate, not the tensors: there, ours come after all that a user may add.
        """
        mine = weakref.ref(self)  # a hook that held its reducer would keep the model alive
        for parameter in self._parameters:
            former = _OWNERS.get(parameter, _nobody)()
            if former is not None:
                former.retire()
            _OWNERS[parameter] = mine
        for index, node in enumerate(self._nodes):
            self._hooks.append(node.register_hook(partial(_accumulated, mine, index)))

    @property
    def retired(self) -> bool:
        """Whether another reducer has these parameters, or some of them."""
        return not self.retire.alive

    @property
    def _cut_short(self) -> bool:
        """Whether the engine has let go of the last backward without calling back."""
        return self._busy and self._callback() is None

    def _forget(self) -> None:
        self._busy = False
        self._first = True  # in this backward, of all reducers of the group
        self._done = [False] * len(self._names)  # those that were made ready in this backward

    def rebind(self, group: Group) -> None:
        """Go on in another generation. Gradients end with their generation: the step that made them is repeated."""
        self._views.drop()
        self.sync.rebind(group)
        self._changed = [False] * len(self._names)
        self._order.learn_again()
        self._forget()
        self.agree()

    def agree(self) -> None:
        """Make sure that all ranks have the same gradients in the same order."""
        self.sync.agree()
        self._views.look_up()

    # -- a backward begins --------------------------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Notice when a backward from this output begins."""
        mine = weakref.ref(self)
        for tensor in tensors_in(output):
            if not tensor.requires_grad or (tensor.is_leaf and self._leaves.get(id(tensor)) is tensor):
                continue
            if tensor.is_leaf:  # it keeps its hook
                self._leaves[id(tensor)] = tensor
            tensor.register_hook(partial(_reached, mine))

    def _reach(self) -> None:
        """A backward came by an output; it may be one that accumulates nothing."""
        self.forget_cut_short()
        if self.enabled and not self._busy and _accumulates(self._nodes):
            self._begin()

    def _begin(self) -> None:
        self._busy = True
        if self._order.is_learning:
            self._order.begin()
        callback = partial(_ended, weakref.ref(self))
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        first = _FIRST.get(self.sync.group, _nobody)()
        self._first = first is None or first is self or not first._busy or first._cut_short
        if self._first:
            _FIRST[self.sync.group] = weakref.ref(self)
        if self.weight is None and self.uneven:
            self.weight = 1.0
        if self.weight is not None and self._first:
            self.sync.begin(self.weight)

    def forget_cut_short(self) -> None:
        """If an error has ended the last backward before its end, and no other rank can know of it yet, forget it."""
        if not self._cut_short:
            return
        if self.sync.under_way:
            raise ConfigError(
                "an error has cut the last backward short while gradients were on their way: "
                "the other ranks wait for the rest of them. End this rank, so that they are told"
            )
        self.sync.begin()
        self._forget()

    def _accumulate(self, index: int) -> None:
        """A gradient is there, or more of it."""
        parameter = self._parameters[index]
        if parameter.grad is None:  # another hook has taken it away
            return
        self.forget_cut_short()
        if self.enabled and not self._busy:
            self._begin()
        if self._done[index]:
            raise ConfigError(
                f"the gradient of {self._names[index]!r} was complete, and its exchange had begun, when backward "
                "added to it: for such a model use DistributedDataParallel(…, overlap=False)"
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
        """Exchange what is left of the gradients; afterwards all ranks have the same."""
        try:
            if self.weight is not None and not self._first:
                self.sync.begin(self.weight)
            self._complete()
            try:
                self.sync.finish()
            except NotFinite:  # on all ranks: whoever skips this step should have the same buffers
                self._after(self.weight != 0)
                raise
            self._views.hand_out()
            self._changed = [False] * len(self._names)
            self._after(self.weight != 0)
            if self._order.end(self.sync):
                self._views.look_up()
        finally:
            self.weight = None
            self._forget()
            malloc.between_passes()

    def _complete(self) -> None:
        """Make ready what has changed since the last exchange. What has not, but is there from an earlier one, takes
        part as it is, for where other ranks have added to it."""
        for index, parameter in enumerate(self._parameters):
            if self._done[index] or parameter.grad is None:
                continue
            self._views.place(index, parameter)
            self.sync.ready(self._names[index], used=self._changed[index], beside=False)

    def sit_out(self) -> bool:
        """Take part in an exchange without data; False if no rank had any."""
        self.weight = 0.0
        self.sync.begin(0.0)
        self.end()
        return self.sync.total_weight > 0

    def clip(self, max_norm: float) -> float:
        """Scale what `.grad` holds now, whoever has put it there; returns the norm that it had."""
        self._views.place_all()
        return self.sync.clip(max_norm)


# Hooks know their reducer weakly.


def _accumulated(reducer: weakref.ref[Reducer], index: int, *_: Any) -> None:
    if (mine := reducer()) is not None:
        mine._accumulate(index)


def _reached(reducer: weakref.ref[Reducer], _: Any) -> None:
    if (mine := reducer()) is not None:
        mine._reach()


def _ended(reducer: weakref.ref[Reducer]) -> None:
    if (mine := reducer()) is not None:
        mine.end()


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _accumulates(parameters: list[Any]) -> bool:
    """Whether the engine, which is about to go on from an output, accumulates gradients: `autograd.grad` does not.

    If no parameter is among what it will run, this rank may have used none: any other leaf tells as much.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, parameters)) or _runs_a_leaf(
            torch._C._current_autograd_node()
        )
    except RuntimeError:  # a leaf that `autograd.grad` was asked for
        return False


def _runs_a_leaf(output: Any) -> bool:
    """Whether the engine accumulates into the first leaf that it finds on its way from here."""
    stack, known = [output], {output}
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            return bool(torch._C._will_engine_execute_node(node))
        following = [one for one, _ in node.next_functions if one is not None and one not in known]
        stack.extend(following)
        known.update(following)
    return True
