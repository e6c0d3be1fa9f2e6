"""Keeps replicas equal: broadcasts the initial values, checks at intervals, and names a rank that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, ConfigError, ReplicasDiverged
from gradwire.operations.types import check_root
from gradwire.training import agreement_check
from gradwire.training.communicator import Communicator
from gradwire.training.engine_group import group_for

_TOGETHER = 64 << 10  # bytes: smaller tensors of one dtype are broadcast in one call


def check_replicas(group: Communicator, tensors: Mapping[str, Any]) -> str:
    """Check that all ranks hold the same tensors: names, shapes, dtypes and bits. All ranks must call it.

    The ranks exchange 32 bytes, and more only if they differ. The group stays usable after the error.

    Args:
        group: The group whose ranks are compared, or another `Communicator`.
        tensors: A dict of arrays by name.

    Returns:
        The digest of all tensors, 32 hexadecimal digits.

    Raises:
        ReplicasDiverged: On every rank. `culprit` is a rank that differs from the majority (of two ranks, rank 1), and
            `tensor` is its first tensor that differs.
        ArrayError: `tensors` is not a dict of arrays.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group: len(gw.check_replicas(group, {"w": np.ones(3)}))
    32
    """
    calls = group_for(group)
    digests = {name: _digest(name, tensor) for name, tensor in _named(tensors).items()}
    whole = xxhash.xxh3_128("".join(f"{name}\0{digest}\0" for name, digest in digests.items()).encode())
    mine = np.frombuffer(whole.digest(), np.uint8)
    both = calls.all_reduce(np.concatenate([mine, 255 - mine]), op="max")  # gives both the maximum and the minimum
    if (both[:16] + both[16:] != 255).any():
        raise diverged(calls.all_gather_values(list(digests.items())), calls.generation)
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


Digests = Sequence[Sequence[str]]  # pairs of a tensor's name and its digest, in the order of one rank


def diverged(
    digests_by_rank: Sequence[Digests | None], generation: int | None = None, step: int | None = None
) -> ReplicasDiverged:
    """Return the error that names the first rank that differs from the majority, and its first tensor that differs.

    `digests_by_rank` has None for a rank that holds no tensors. `step` is the step after which the ranks differ.

    >>> print(diverged([[["w", "a"], ["b", "1"]], None, [["w", "a"], ["b", "2"]]]))
    rank 2 holds a different 'b' (digest 2) than rank 0 (digest 1): the replicas have diverged
    """
    held = {rank: tuple((n, d) for n, d in one) for rank, one in enumerate(digests_by_rank) if one is not None}
    majority, count = Counter(held.values()).most_common(1)[0]  # in a tie, the digests of the lowest rank
    others = [rank for rank, one in held.items() if one != majority]
    culprit = others[0]
    tensor = _first_difference(held[culprit], majority)
    also = ", ".join(map(str, others[1:]))
    more = "" if not also else f"; ranks {also} differ too" if others[2:] else f"; rank {also} differs too"
    first = next(rank for rank, one in held.items() if one == majority)
    against = f"{count} of {len(held)} ranks" if count > 1 else f"rank {first}"
    after = "" if step is None else f"after step {step}, "
    digests = [dict(one).get(tensor, "none")[:16] for one in (held[culprit], majority)]
    return ReplicasDiverged(
        f"{after}rank {culprit} holds a different {tensor!r} (digest {digests[0]}) than {against} "
        f"(digest {digests[1]}): the replicas have diverged{more}",
        culprit=culprit,
        tensor=tensor,
        operation="check_replicas" if step is None else f"step {step}",
        generation=generation,
    )


def _first_difference(mine: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]) -> str:
    """Return the first name whose digest is different or missing, or else the first name out of order."""
    here, there = dict(mine), dict(other)
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    return differing[0] if differing else next(one[0] for one, two in zip(mine, other, strict=True) if one != two)


class Contract:
    """Calls `check_replicas` at every `every`-th step.

    Args:
        group: The group whose ranks are compared, or another `Communicator`.
        every: The number of steps from one check to the next. 0 turns the checks off.

    Raises:
        ConfigError: `every` is not a whole number, or is negative.

    >>> import gradwire as gw, numpy as np
    >>> weights = {"w": np.ones(3)}
    >>> with gw.init() as group:
    ...     contract = gw.Contract(group, every=100)
    ...     [step for step in range(1, 201) if contract.check(weights)]
    [100, 200]
    """

    def __init__(self, group: Communicator, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"every is {every!r}: it must be a number of steps, or 0 for no checks")
        group_for(group)  # raises if it lacks a call
        self.group = group
        self.every = every
        self._steps = 0

    def check(self, tensors: Mapping[str, Any]) -> bool:
        """Count a step, and check the replicas if the check is due. All ranks must call it in each step.

        Args:
            tensors: A dict of arrays by name.

        Returns:
            Whether this call checked the replicas.

        Raises:
            ReplicasDiverged: The ranks hold different tensors; see `check_replicas`.
        """
        self._steps += 1
        if not self.every or self._steps % self.every:
            return False
        check_replicas(self.group, tensors)
        return True

    def rebind(self, group: Communicator) -> None:
        """Continue with the group of the next generation. All ranks start counting at 0, as joining ranks do."""
        if group is not self.group:
            self.group, self._steps = group, 0


def broadcast_named(group: Communicator, tensors: Mapping[str, Any], root: int = 0) -> Mapping[str, Any]:
    """Copy the tensors of the root into those of every other rank, in place. All ranks must call it.

    Use it to start all replicas with the same values.

    Args:
        group: The group whose ranks receive the tensors, or another `Communicator`.
        tensors: A dict of arrays by name. Names, shapes and dtypes must be the same on all ranks.
        root: The rank whose values are copied.

    Returns:
        `tensors`.

    Raises:
        ConfigError: On every rank, if names, shapes or dtypes differ. It names the rank and the tensor, and the group
            stays usable.
        ArrayError: A value is not an array that can be written in place.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group: gw.broadcast_named(group, {"w": np.ones(2)})
    {'w': array([1., 1.])}
    """
    calls = group_for(group)
    root = check_root(root, calls.size)
    views = {}
    for name, tensor in _named(tensors).items():
        try:
            views[name] = arrays.view(tensor, writable=calls.rank != root)
        except ArrayError as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise
    agreement_check.check_and_gather(
        calls, "broadcast_named", [f"{name!r}: {arrays.describe(one.array)}" for name, one in views.items()]
    )
    small: dict[arrays.DType, list[arrays.View]] = {}
    for one in views.values():
        if one.flat.nbytes < _TOGETHER:
            small.setdefault(one.dtype, []).append(one)
            continue
        calls.broadcast(one.load(), root)
        _store([one], one.flat, calls.rank == root)
    for several in small.values():
        flat = np.concatenate([one.load() for one in several])
        calls.broadcast(flat, root)
        _store(several, flat, calls.rank == root)
    return tensors


def _store(views: Sequence[arrays.View], flat: Array, is_root: bool) -> None:
    at = 0
    for one in views if not is_root else ():
        one.flat[:] = flat[at : at + one.flat.size]
        at += one.flat.size
        one.store()
