"""The contract that all replicas hold the same bits: equal starts, checks at intervals, and the rank that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, ConfigError, ReplicasDiverged
from gradwire.group import Group
from gradwire.training import agreement_check

_TOGETHER = 64 << 10  # bytes: smaller tensors are broadcast side by side


def check_replicas(group: Group, tensors: Mapping[str, Any]) -> str:
    """Raise `ReplicasDiverged` on every rank unless all hold the same names, shapes, dtypes and bits; the digest.

    It names the rank that differs from most (of two, the higher) and its first tensor that does. What is exchanged is
    32 bytes; more only if they differ. The group goes on.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group: len(gw.check_replicas(group, {"w": np.ones(3)}))
    32
    """
    digests = {name: _digest(name, tensor) for name, tensor in _named(tensors).items()}
    whole = xxhash.xxh3_128("".join(f"{name}\0{digest}\0" for name, digest in digests.items()).encode())
    mine = np.frombuffer(whole.digest(), np.uint8)
    both = group.all_reduce(np.concatenate([mine, 255 - mine]), op="max")  # of (x, -x) the maximum gives both ends
    if (both[:16] + both[16:] != 255).any():
        raise diverged(group.all_gather_values(list(digests.items())), group.generation)
    return whole.hexdigest()


def _named(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(tensors, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(tensors).__name__}")
    return tensors


def _digest(name: str, tensor: Any) -> str:
    array = np.ascontiguousarray(_as_array(name, tensor))
    digest = xxhash.xxh3_128(arrays.describe(array).encode())
    digest.update(arrays.raw(array.reshape(-1)))
    return digest.hexdigest()


def _as_array(name: str, tensor: Any) -> Array:
    try:
        array = np.asarray(tensor) if isinstance(tensor, np.generic) else arrays.as_array(tensor)
        arrays.dtype_of(array)
    except ArrayError as error:
        error.args = (f"{name!r}: {error.message}", *error.args[1:])
        raise
    return array


Digests = Sequence[Sequence[str]]  # of one rank: pairs of a tensor's name and its digest, in the rank's order


def diverged(
    everyones: Sequence[Digests | None], generation: int | None = None, step: int | None = None
) -> ReplicasDiverged:
    """The error that names the first rank that differs from most, and its first tensor that does.

    Each rank sends its tensors' digests, or None if it holds none of them. `step` is the one after which they differ.

    >>> print(diverged([[["w", "a"], ["b", "1"]], None, [["w", "a"], ["b", "2"]]]))
    rank 2 holds another 'b' (digest 2) than rank 0 (digest 1): the replicas are no longer the same
    """
    held = {rank: tuple((n, d) for n, d in one) for rank, one in enumerate(everyones) if one is not None}
    usual, most = Counter(held.values()).most_common(1)[0]  # of equally common ones, the lowest rank's
    others = [rank for rank, one in held.items() if one != usual]
    culprit = others[0]
    tensor = _first_difference(held[culprit], usual)
    more = f"; so do ranks {', '.join(map(str, others[1:]))}" if others[1:] else ""
    first = next(rank for rank, one in held.items() if one == usual)
    against = f"{most} of {len(held)} ranks" if most > 1 else f"rank {first}"
    after = "" if step is None else f"after step {step} "
    digests = [dict(one).get(tensor, "none")[:16] for one in (held[culprit], usual)]
    return ReplicasDiverged(
        f"{after}rank {culprit} holds another {tensor!r} (digest {digests[0]}) than {against} (digest {digests[1]}): "
        f"the replicas are no longer the same{more}",
        culprit=culprit,
        tensor=tensor,
        operation="check_replicas" if step is None else f"step {step}",
        generation=generation,
    )


def _first_difference(mine: tuple[tuple[str, str], ...], usual: tuple[tuple[str, str], ...]) -> str:
    """The first name that stands for something else, or for nothing, on the other side; else the first out of order."""
    here, there = dict(mine), dict(usual)
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    return differing[0] if differing else next(one[0] for one, other in zip(mine, usual, strict=True) if one != other)


class Contract:
    """Checks every so many steps that replicas are the same; `every=0` never does.

    >>> import gradwire as gw, numpy as np
    >>> weights = {"w": np.ones(3)}
    >>> with gw.init() as group:
    ...     contract = gw.Contract(group, every=100)
    ...     [step for step in range(1, 201) if contract.check(weights)]
    [100, 200]
    """

    def __init__(self, group: Group, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"every is {every!r}: a number of steps, or 0 for never")
        self.group = group
        self.every = every
        self._steps = 0

    def check(self, tensors: Mapping[str, Any]) -> bool:
        """Count a step, and at every k-th one `check_replicas`; whether it did. All ranks call it in each step."""
        self._steps += 1
        if not self.every or self._steps % self.every:
            return False
        check_replicas(self.group, tensors)
        return True

    def rebind(self, group: Group) -> None:
        """Go on with the next generation's group. All ranks count from there, those that have joined it too."""
        if group is not self.group:
            self.group, self._steps = group, 0


def broadcast_named(group: Group, tensors: Mapping[str, Any], root: int = 0) -> Mapping[str, Any]:
    """Copy the root's tensors into those of every rank: how replicas begin alike. Returns the tensors.

    Names, shapes and dtypes that differ are an error on all ranks that says where; the group goes on.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group: gw.broadcast_named(group, {"w": np.ones(2)})
    {'w': array([1., 1.])}
    """
    views = {}
    for name, tensor in _named(tensors).items():
        try:
            views[name] = arrays.view(tensor, writable=group.rank != root)
        except ArrayError as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise
    agreement_check.check_and_gather(
        group, "broadcast_named", [f"{name!r}: {arrays.describe(one.array)}" for name, one in views.items()]
    )
    small: dict[arrays.DType, list[arrays.View]] = {}
    for one in views.values():
        if one.flat.nbytes < _TOGETHER:
            small.setdefault(one.dtype, []).append(one)
            continue
        group.broadcast(one.load(), root)
        _store([one], one.flat, group.rank == root)
    for several in small.values():
        flat = np.concatenate([one.load() for one in several])
        group.broadcast(flat, root)
        _store(several, flat, group.rank == root)
    return tensors


def _store(views: Sequence[arrays.View], flat: Array, is_root: bool) -> None:
    at = 0
    for one in views if not is_root else ():
        one.flat[:] = flat[at : at + one.flat.size]
        at += one.flat.size
        one.store()
