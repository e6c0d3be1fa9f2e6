"""Train a small GPT to sort digits, with plain torch DDP that reduces its gradients through gradwire.

    torchrun --nproc-per-node 2 examples/gpt_torchrun.py                  # two ranks on this machine
    torchrun --nproc-per-node 2 examples/gpt_torchrun.py --backend gloo   # the same on Gloo
    gradwire run -n 2 examples/gpt_torchrun.py                            # started by gradwire
    python examples/gpt_torchrun.py                                       # one rank
    torchrun --nproc-per-node 2 examples/gpt_torchrun.py --checkpoint DIR # stop it with SIGTERM, run it again

An existing script needs only the name of the backend, and does not import gradwire. Then its steps spend less time on
communication, and if a rank dies, all other ranks raise an error that names it within a second.

With `--checkpoint`, three more lines make the script continue where it was stopped. SIGTERM or SIGUSR2, to torchrun or
to a rank, stops all ranks after the same step, with a checkpoint. The same command, also with another number of ranks,
then continues with the next batch: the questions of a step depend on its number only.

The model reads eight digits and a separator, and writes the digits in order. At the end the ranks compare weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LENGTH, DIGITS = 8, 6
MARK = DIGITS  # the separator between question and answer
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 128  # samples per step, over all ranks
CHECKPOINT_EVERY = 100  # steps

Steps = Iterator[tuple[int, contextlib.AbstractContextManager[Any]]]  # the number of each step, and its context


class Block(nn.Module):  # type: ignore[misc]
    """A transformer layer: causal attention, then a small network at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(2 * LENGTH + 1, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS + 1, bias=False)
        self.head.weight = self.words.weight  # tied weights: one parameter with one gradient
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def questions(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random digits followed by the separator, and the same digits in order."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.cat([digits, torch.full((count, 1), MARK)], 1), digits.sort(1).values


def answers(model: nn.Module, asked: Tensor) -> Tensor:
    """Return what the model writes, digit by digit."""
    text = asked
    for _ in range(LENGTH):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text[:, asked.shape[1] :]


def plain_steps(total: int) -> Steps:
    return ((index, contextlib.nullcontext()) for index in range(total))


def elastic_steps(state: dict[str, Any], total: int, folder: str) -> Steps:
    """Load the newest checkpoint of the folder into the state. Return the steps that are left to do."""
    import gradwire as gw

    run = gw.elastic(state, checkpoint=folder, checkpoint_every=CHECKPOINT_EVERY)  # with the ranks of the process group
    run.begin()
    if run.completed >= 0 and run.group.rank == 0:
        print(f"continues after step {run.completed}", flush=True)
    return ((step.index, step) for step in run.steps(total))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="gradwire", help="backend of torch.distributed (default: gradwire)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument("--checkpoint", metavar="DIR", help="write checkpoints to this folder, and continue from them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without a launcher there is one rank
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = plain_steps(arguments.steps)
    if arguments.checkpoint:
        steps = elastic_steps({"model": model.module, "optimizer": optimizer}, arguments.steps, arguments.checkpoint)
    began, done = time.perf_counter(), 0
    for index, step in steps:
        with step:
            asked, right = (part[rank::size] for part in questions(BATCH, 1 + index))  # this rank's questions
            logits = model(torch.cat([asked, right[:, :-1]], 1))[:, LENGTH:]
            loss = functional.cross_entropy(logits.flatten(0, 1), right.flatten())
            optimizer.zero_grad()
            loss.backward()  # also averages the gradients over all ranks
            optimizer.step()
        done += 1
        if rank == 0 and index % 50 == 0:
            print(f"step {index}: loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - began

    with torch.no_grad():
        asked, right = questions(200, 0)
        sorted_well = (answers(model.module, asked) == right).all(1).float().mean().item()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    copies = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(copies, weights)
    identical = all(torch.equal(copy, weights) for copy in copies)
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8]
    if rank == 0:
        print(f"{size} ranks, {arguments.backend}: {seconds / max(done, 1) * 1e3:.1f} ms per step", flush=True)
        print(f"{sorted_well:.0%} of new questions sorted without a mistake", flush=True)
        print(f"the weights are {'identical' if identical else 'NOT identical'} on all ranks, {digest}", flush=True)
    dist.destroy_process_group()
    return 0 if identical and sorted_well > 0.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
