"""All-reduce of sparse tensors: each rank gathers the indices and values of all ranks, and adds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from gradwire.errors import UnsupportedOp
from gradwire.operations import Exchange, Operation, Position, split_join
from gradwire.torch.backend.tensors import array_of, describe, reduction


def all_reduce(tensor: torch.Tensor, op: Any, size: int) -> Operation:
    """Return the sum of sparse COO tensors of one shape, in place; other layouts and ops raise `UnsupportedOp`."""
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedOp(f"{describe(tensor)} cannot be reduced", operation="all_reduce")
    if reduction(op, tensor).op != "sum" or not reduction(op, tensor).plain:
        raise UnsupportedOp("sparse tensors can only be summed: use ReduceOp.SUM", operation="all_reduce")

    def body(exchange: Exchange) -> None:
        own = tensor.detach().coalesce()
        _check_alike(own, exchange)
        at = Position(exchange.rank, exchange.size)
        indices = split_join.all_gather(at, array_of(own.indices().t().contiguous())).body(exchange)
        values = split_join.all_gather(at, array_of(own.values().contiguous())).body(exchange)
        all_indices = torch.from_numpy(np.ascontiguousarray(indices.T))
        all_values = torch.from_numpy(values)
        # Each rank adds in rank order, so all ranks get the same bits.
        total = torch.sparse_coo_tensor(all_indices, all_values, own.shape, check_invariants=False).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    return Operation("all_reduce", body)


def _check_alike(own: torch.Tensor, exchange: Exchange) -> None:
    """Raise if the ranks have tensors of different shapes: then an index could be out of range."""
    mine = xxhash.xxh3_128_digest(f"{describe(own)}, {own.sparse_dim()} sparse".encode())
    at = Position(exchange.rank, exchange.size)
    digests = split_join.all_gather(at, np.frombuffer(mine, np.uint8)).body(exchange)
    for rank, digest in enumerate(np.asarray(digests).reshape(exchange.size, -1)):
        if digest.tobytes() != mine:
            raise exchange.disagree(
                f"rank {exchange.rank} has {describe(own)}, but rank {rank} has a tensor of another shape or dtype"
            )
