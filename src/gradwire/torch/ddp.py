"""DistributedDataParallel: a model whose gradients are averaged over all ranks in each backward."""

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
from gradwire.torch.model_guard import ModelGuard, trained
from gradwire.torch.reducer import Reducer
from gradwire.torch.views import as_array
from gradwire.training import agreement_check, weights
from gradwire.training.bucket_reduction import Compression
from gradwire.training.contract import broadcast_named

if TYPE_CHECKING:
    from gradwire.training.elastic import Elastic

PREFIX = "module."


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Wrap a model: its parameters begin as rank 0's, and each backward averages gradients over the ranks, as it runs.

    >>> import gradwire as gw, torch
    >>> with gw.init() as group:
    ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
    ...     model(torch.ones(2, 3)).sum().backward()
    >>> model.module.weight.grad
    tensor([[2., 2., 2.]])
    >>> list(model.state_dict())                        # as if it were not wrapped
    ['weight', 'bias']

    Forward never communicates, and all ranks hold the same bits after each backward and each step of an optimizer.
    Parameters that no rank used have no gradient; one that some ranks did not use counts as zeros there. `.grad` is a
    view of the memory that ranks exchange, so gradients are held once.

    group           whose ranks train together; by default that of `gw.init()`, which is called if it was not. Or an
                    elastic run: the model follows it from generation to generation, and begins with the run's state
    compression     "f16", "bf16", "int8", "topk", or an object of `gradwire.training.compression`
    check_finite    a NaN or Inf on one rank raises `NotFinite` on all, naming rank and tensor
    contract_every  compare all parameters and buffers each so many backwards; 0: never
    broadcast_buffers  take over rank 0's buffers after each backward
    overlap         exchange gradients while backward still runs, where there is a core for it
    algorithm       of the all-reduce; chosen by size, ranks and topology unless named
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
        self._parts = ModelGuard(module)
        self.reducer = Reducer(
            self.group,
            trained(module),
            _weakly(self),
            overlap,
            bucket_bytes=max(1, int(bucket_mb * (1 << 20))),
            first_bucket_bytes=max(1, int(first_bucket_mb * (1 << 20))),
            compression=compression,
            check_finite=check_finite,
            contract_every=contract_every,
            algorithm=algorithm,
        )
        self._met: Group | None = None  # with whose ranks it is known to agree
        self._remembered: tuple[int, dict[str, Any]] | None = None  # buffers, as they were after a step
        malloc.keep(self.group.topology, self.group.rank)
        if isinstance(self._owner, Group):  # an elastic run brings the state, to those who join later too
            self._meet()
            broadcast_named(self.group, self._arrays())
        else:
            self._owner.when_cut_short(_undoing(self))
        self.reducer.take_over()
        self._register_load_state_dict_pre_hook(_put_prefix, with_module=True)
        named = (*module.named_parameters(), *module.named_buffers())
        self._own_names = frozenset(name for name, _ in named).difference(self.__dict__)

    @property
    def group(self) -> Group:
        """The ranks that train together; of an elastic run, those of the present generation."""
        owner = self._owner
        found: Group = owner if isinstance(owner, Group) else owner.group
        return found

    # -- in each step -------------------------------------------------------------------------------------------------

    # torch.compile compiles what is inside. torch.compiler.disable would import the compiler at once; this does when it
    # is called, as every optimizer does that is made.
    @torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's own forward. Nothing is exchanged here."""
        self._prepare()
        output = self.module(*inputs, **named)
        if torch.is_grad_enabled():
            self.reducer.watch(output)
        return output

    def _prepare(self) -> None:
        if not torch.is_grad_enabled():
            return
        malloc.between_passes()
        self._meet()
        self._remember()
        self.reducer.forget_cut_short()
        if self.reducer.retired:
            raise ConfigError(
                "the model, or a part of it, was wrapped again: use the new DistributedDataParallel; "
                "models that share parameters are wrapped as one"
            )
        self._parts.check()
        if any(isinstance(self.__dict__[name], torch.Tensor) for name in self._own_names & self.__dict__.keys()):
            raise ConfigError("functional_call puts tensors beside the wrapped model: call it with the model's .module")

    def _remember(self) -> None:
        """Forward changes buffers. If the step of an elastic run is cut short, they must be what they were."""
        owner = self._owner
        if isinstance(owner, Group) or (self._remembered and self._remembered[0] == owner.completed):
            return
        self._remembered = owner.completed, self._buffers_of.remember()

    def _undo(self) -> None:
        if self._remembered and self._remembered[0] == self._owner.completed:
            self._buffers_of.restore(self._remembered[1])

    def _meet(self) -> None:
        """Once in each generation: make sure that all ranks have the same model."""
        group = self.group
        if self._met is group:
            return
        agreement_check.check_and_gather(group, "DistributedDataParallel", self._description())
        if self.broadcast_buffers:
            self._buffers_of.are_alike(group)
        if group is not self.reducer.sync.group:
            self.reducer.rebind(group)
        else:
            self.reducer.agree()
        self._met = group

    def _description(self) -> list[str]:
        parameters = [
            f"{name!r}: {one.dtype}{list(one.shape)}, strides {one.stride()}{'' if one.requires_grad else ', frozen'}"
            for name, one in self.module.named_parameters()
        ]
        buffers = self._buffers_of.arrays() if self.broadcast_buffers else {}
        return [*parameters, *describe(buffers)]

    def _after_backward(self, had_data: bool) -> None:
        """Gradients are the same everywhere now; see to the rest of the model."""
        uneven, contract = self.reducer.uneven, self.reducer.sync.contract
        if self.broadcast_buffers:
            self._buffers_of.broadcast(self.group, join.first_with_data(self.group, had_data) if uneven else 0)
        if contract.every and not uneven:  # whoever is out of data has an older model until the others are done
            contract.check(self._arrays())

    def _arrays(self) -> dict[str, Any]:
        """All arrays that ranks hold alike: parameters, and buffers if they are broadcast."""
        parameters = {name: as_array(name, one) for name, one in self.module.named_parameters()}
        return parameters | (self._buffers_of.arrays() if self.broadcast_buffers else {})

    # -- what users call ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only add to the gradients; the next one outside exchanges what has come together.

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
        """Whether backward exchanges gradients; as in torch's own wrapper, for loops that switch it by hand."""
        return self.reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.reducer.enabled = enabled

    def join(self, *states: Any) -> contextlib.AbstractContextManager[None]:
        """Around a loop over data that ends earlier on some ranks: who has none left takes part without, until all end.

        Gradients are averaged over those that have data. At the end all ranks get the model of those that went on
        longest, and with it the states of what is named here: the optimizer, a scheduler. Every rank names the same.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with model.join(optimizer):
        ...         for batch in [torch.ones(2, 3)]:
        ...             model(batch).sum().backward()
        ...             optimizer.step()
        """
        me = join.Replica(lambda: self.group, self.reducer, self._meet, self._arrays, self.zero_grad)
        return join.joined(me, states)

    def weigh(self, samples: float) -> None:
        """The next backward of this rank counts for so many samples in the mean; every rank calls it before its own.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     model = gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     model.weigh(2)
        ...     model(torch.ones(2, 3)).mean().backward()
        """
        self.reducer.weight = weights.checked(samples)

    def sit_out(self) -> None:
        """Take part in the next backward of the others without data: a weight of 0.

        >>> import gradwire as gw, torch
        >>> with gw.init():
        ...     gw.torch.DistributedDataParallel(torch.nn.Linear(3, 1)).sit_out()
        """
        self._meet()
        self.reducer.sit_out()

    def clip(self, max_norm: float) -> float:
        """Scale all gradients down to this norm if theirs is greater; returns what it was. The same bits everywhere.

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
        """The model's own, without a prefix."""
        return self.module.state_dict(*args, **named)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Into the model; states that were saved with the prefix of torch's wrapper, too. All ranks load the same."""
        if assign:
            raise ConfigError("assign=True puts other parameters into the model: load first, then wrap it")
        known = self.module.state_dict()
        if state_dict and all(name.startswith(PREFIX) and name not in known for name in state_dict):
            state_dict = {name.removeprefix(PREFIX): value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, *args: Any, **named: Any) -> Any:
        """The model's own, by names without a prefix."""
        return self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Any:
        """The model's own, by names without a prefix."""
        return self.module.named_buffers(*args, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to its group: copy or pickle its .module or its state_dict()"
        )


def _weakly(model: DistributedDataParallel) -> Callable[[bool], None]:
    """What a reducer does at the end, without keeping the model alive."""
    mine = weakref.ref(model)

    def after(had_data: bool) -> None:
        if (found := mine()) is not None:
            found._after_backward(had_data)

    return after


def _undoing(model: DistributedDataParallel) -> Callable[[], None]:
    mine = weakref.ref(model)

    def undo() -> None:
        if (found := mine()) is not None:
            found._undo()

    return undo


def _put_prefix(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """For models that contain a wrapped one: what was saved without the prefix is loaded without it."""
    for name in [prefix + name for name in wrapper.module.state_dict() if prefix + name in state]:
        state[f"{prefix}{PREFIX}{name.removeprefix(prefix)}"] = state.pop(name)
