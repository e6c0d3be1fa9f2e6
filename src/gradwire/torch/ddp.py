"""`DistributedDataParallel`: averages the gradients of a model over all ranks in each backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import ConfigError
from gradwire.group import Group
from gradwire.host import malloc
from gradwire.job import init, process_hooks
from gradwire.torch import join
from gradwire.torch.buffers import Buffers, describe
from gradwire.torch.model_guard import ModelGuard, trainable
from gradwire.torch.reducer import Reducer
from gradwire.torch.views import as_array
from gradwire.training import agreement_check, weights
from gradwire.training.bucket_reduction import Compression
from gradwire.training.contract import broadcast_named

if TYPE_CHECKING:
    from gradwire.training.elastic import Elastic

PREFIX = "module."


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Wraps a model for data-parallel training: each backward pass averages the gradients over all ranks.

    All ranks start with the parameters and buffers of rank 0. The gradients are exchanged while backward runs, so all
    ranks hold the same bits after each backward pass and each optimizer step. All ranks must wrap the same model.

    >>> import gradwire as gw, torch
    >>> with gw.init() as group:
    ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
    ...     model(torch.ones(2, 3)).sum().backward()
    >>> model.module.weight.grad
    tensor([[2., 2., 2.]])
    >>> list(model.state_dict())                        # as if it were not wrapped
    ['weight', 'bias']

    `.grad` is a view of the memory that the ranks exchange, so gradients are stored only once. A parameter that no rank
    used has no gradient. A parameter that only some ranks used counts as zeros on the others. A forward pass does not
    communicate, except for the check that all ranks have the same model, once in each generation.

    Unfreezing or adding parameters after wrapping is not supported: the next forward pass raises `ConfigError`. Create
    a new wrapper instead.

    Args:
        module: The model, with dense parameters in CPU memory.
        group: The group whose ranks train together. By default the group of `gw.init()`, which is called if needed.
            With an elastic run, the model uses the run's current group, and starts with the run's state.
        bucket_mb: The size of a bucket in MiB.
        first_bucket_mb: The size of the first bucket in MiB. A small one lets communication start early.
        compression: "f16", "bf16", "int8", "topk", or an object of `gradwire.training.compression`. None sends the
            gradients as they are.
        check_finite: Raise `NotFinite` on all ranks if a gradient of any rank has a NaN or an infinite value.
        contract_every: The number of backward passes from one comparison of all parameters and buffers to the next. A
            difference raises `ReplicasDiverged` on all ranks. 0 turns the comparison off.
        broadcast_buffers: Copy rank 0's buffers to all ranks after each backward pass.
        overlap: Exchange gradients while backward still runs, if a CPU core is free for it. The first backward pass
            never overlaps.
        algorithm: The algorithm of the all-reduce; "auto" chooses by size, ranks and topology.

    Raises:
        ConfigError: On every rank, if the ranks wrap different models. Also if no parameter requires a gradient, or a
            parameter has no shape yet.
        ArrayError: A parameter is not a dense tensor in CPU memory.
    """

    def __init__(
        self,
        module: Any,
        group: Group | Elastic | None = None,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        compression: Compression | str | None = None,
        check_finite: bool = True,
        contract_every: int = 0,
        broadcast_buffers: bool = True,
        overlap: bool = True,
        algorithm: str = "auto",
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._owner: Any = group if group is not None else process_hooks.current() or init.init()
        self._buffers_of = Buffers(module)
        self._guard = ModelGuard(module)
        self.reducer = Reducer(
            self.group,
            trainable(module),
            _weakly(self),
            overlap,
            bucket_bytes=max(1, int(bucket_mb * (1 << 20))),
            first_bucket_bytes=max(1, int(first_bucket_mb * (1 << 20))),
            compression=compression,
            check_finite=check_finite,
            contract_every=contract_every,
            algorithm=algorithm,
        )
        self._checked_group: Group | None = None  # the group whose ranks are known to have the same model
        self._snapshot: tuple[int, dict[str, Any]] | None = None  # a step, and the buffers after that step
        malloc.keep(self.group.topology, self.group.rank)
        if isinstance(self._owner, Group):  # an elastic run distributes the state itself, also to ranks that join
            self._check_model()
            broadcast_named(self.group, self._arrays())
        else:
            self._owner.when_cut_short(_buffer_restorer(self))
        self.reducer.attach()
        self._register_load_state_dict_pre_hook(_put_prefix, with_module=True)
        named = (*module.named_parameters(), *module.named_buffers())
        self._own_names = frozenset(name for name, _ in named).difference(self.__dict__)

    @property
    def group(self) -> Group:
        """The group whose ranks train together; with an elastic run, the group of the current generation."""
        owner = self._owner
        found: Group = owner if isinstance(owner, Group) else owner.group
        return found

    # -- in each step -------------------------------------------------------------------------------------------------

    # torch.compile compiles the wrapped model, not this function. torch.compiler.disable would import the compiler at
    # once; this decorator imports it on the first call, when an optimizer has usually imported it already.
    @torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward pass of the wrapped model.

        Raises:
            ConfigError: A parameter was added or unfrozen, the model was wrapped again, or an error interrupted the
                last backward pass while gradients were being exchanged.
        """
        self._prepare()
        output = self.module(*inputs, **named)
        if torch.is_grad_enabled():
            self.reducer.watch(output)
        return output

    def _prepare(self) -> None:
        if not torch.is_grad_enabled():
            return
        malloc.between_passes()
        self._check_model()
        self._take_snapshot()
        self.reducer.discard_interrupted()
        if self.reducer.retired:
            raise ConfigError(
                "the model, or a part of it, was wrapped again: use the new DistributedDataParallel. "
                "Models that share parameters must be wrapped as one model"
            )
        self._guard.check()
        if any(isinstance(self.__dict__[name], torch.Tensor) for name in self._own_names & self.__dict__.keys()):
            raise ConfigError("functional_call does not reach the wrapped model: pass the wrapper's .module to it")

    def _take_snapshot(self) -> None:
        """Copy the buffers before the first forward pass of an elastic step, which changes them.

        If the step is interrupted, `_restore_buffers` resets them.
        """
        owner = self._owner
        if isinstance(owner, Group) or (self._snapshot and self._snapshot[0] == owner.completed):
            return
        self._snapshot = owner.completed, self._buffers_of.snapshot()

    def _restore_buffers(self) -> None:
        if self._snapshot and self._snapshot[0] == self._owner.completed:
            self._buffers_of.restore(self._snapshot[1])

    def _check_model(self) -> None:
        """Check once in each generation that all ranks have the same model, and move the gradients to its group."""
        group = self.group
        if self._checked_group is group:
            return
        agreement_check.check_and_gather(group, "DistributedDataParallel", self._description())
        if self.broadcast_buffers:
            self._buffers_of.mark_checked(group)
        if group is not self.reducer.sync.group:
            self.reducer.rebind(group)
        else:
            self.reducer.agree()
        self._checked_group = group

    def _description(self) -> list[str]:
        parameters = [
            f"{name!r}: {one.dtype}{list(one.shape)}, strides {one.stride()}{'' if one.requires_grad else ', frozen'}"
            for name, one in self.module.named_parameters()
        ]
        buffers = self._buffers_of.arrays() if self.broadcast_buffers else {}
        return [*parameters, *describe(buffers)]

    def _after_backward(self, had_data: bool) -> None:
        """Broadcast the buffers and check the contract, after the gradients have been averaged."""
        uneven, contract = self.reducer.uneven, self.reducer.sync.contract
        if self.broadcast_buffers:
            self._buffers_of.broadcast(self.group, join.first_with_data(self.group, had_data) if uneven else 0)
        if contract.every and not uneven:  # in `join`, a rank without data has an older model until `join` ends
            contract.check(self._arrays())

    def _arrays(self) -> dict[str, Any]:
        """Return all replicated arrays: the parameters, and the buffers if they are broadcast."""
        parameters = {name: as_array(name, one) for name, one in self.module.named_parameters()}
        return parameters | (self._buffers_of.arrays() if self.broadcast_buffers else {})

    # -- what users call ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication. The next backward pass outside of `no_sync` exchanges the sum.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     with model.no_sync():
        ...         model(torch.ones(2, 3)).sum().backward()
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> model.module.bias.grad
        tensor([4.])
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward exchanges gradients. It has the same name as in torch's wrapper; `no_sync` sets it."""
        return self.reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.reducer.enabled = enabled

    def join(self, *states: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a training loop in which ranks may have different numbers of batches.

        A rank that has left the loop takes part in the collectives of the others until all ranks are done. Gradients
        are averaged over the ranks that still have data. At the end, all ranks receive the model of a rank that had
        data until the end, and the states passed here.

        Args:
            states: Objects with `state_dict` and `load_state_dict`, such as the optimizer and a scheduler. All ranks
                must pass the same ones.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with model.join(optimizer):
        ...         for batch in [torch.ones(2, 3)]:
        ...             model(batch).sum().backward()
        ...             optimizer.step()
        """
        replica = join.Replica(lambda: self.group, self.reducer, self._check_model, self._arrays, self.zero_grad)
        return join.joined(replica, states)

    def weigh(self, samples: float) -> None:
        """Set the weight of this rank in the next backward pass. Either all ranks call it or none does.

        Args:
            samples: The weight, for example the number of samples in this rank's batch.

        Raises:
            ConfigError: `samples` is not a finite number of at least 0.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     model.weigh(2)
        ...     model(torch.ones(2, 3)).mean().backward()
        """
        self.reducer.weight = weights.checked(samples)

    def sit_out(self) -> None:
        """Take part in the next backward pass of the other ranks without data, with weight 0.

        Call it instead of forward and backward. The other ranks must call `weigh` before their backward pass.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1)).sit_out()
        """
        self._check_model()
        self.reducer.sit_out()

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global 2-norm is at most `max_norm`. All ranks must call it.

        Args:
            max_norm: The largest norm allowed, at least 0.

        Returns:
            The norm before clipping. It has the same bits on all ranks, and so have the scaled gradients.

        Raises:
            ConfigError: `max_norm` is NaN or negative.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     model(torch.ones(1, 3)).sum().backward()
        ...     model.clip(1.0)
        2.0
        """
        return self.reducer.clip(max_norm)

    # -- as if it were not wrapped ------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """Return the state of the wrapped model, with the model's own names (without the prefix "module.")."""
        return self.module.state_dict(*args, **named)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state into the wrapped model. All ranks must load the same state.

        Args:
            state_dict: The state, with or without the prefix "module." that torch's wrapper adds.
            strict: Require that the names match exactly.
            assign: Must be False: the wrapper needs the parameters that it has wrapped.

        Raises:
            ConfigError: `assign` is True.
        """
        if assign:
            raise ConfigError("assign=True replaces the model's parameters: load the state before you wrap the model")
        known = self.module.state_dict()
        if state_dict and all(name.startswith(PREFIX) and name not in known for name in state_dict):
            state_dict = {name.removeprefix(PREFIX): value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, *args: Any, **named: Any) -> Any:
        """Iterate over the parameters of the wrapped model, with the model's own names."""
        return self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Any:
        """Iterate over the buffers of the wrapped model, with the model's own names."""
        return self.module.named_buffers(*args, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel cannot be copied or pickled, because it belongs to its group: "
            "copy or pickle its .module or its state_dict() instead"
        )


def _weakly(model: DistributedDataParallel) -> Callable[[bool], None]:
    """Return the model's `_after_backward` as a function that does not keep the model alive."""
    reference = weakref.ref(model)

    def after(had_data: bool) -> None:
        if (found := reference()) is not None:
            found._after_backward(had_data)

    return after


def _buffer_restorer(model: DistributedDataParallel) -> Callable[[], None]:
    """Return the model's `_restore_buffers` as a function that does not keep the model alive."""
    reference = weakref.ref(model)

    def restore() -> None:
        if (found := reference()) is not None:
            found._restore_buffers()

    return restore


def _put_prefix(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the prefix "module." to the names of a state before loading, for models that contain a wrapped model.

    `state_dict` saves such a state without the prefix, but torch's loading expects it.
    """
    for name in [prefix + name for name in wrapper.module.state_dict() if prefix + name in state]:
        state[f"{prefix}{PREFIX}{name.removeprefix(prefix)}"] = state.pop(name)
