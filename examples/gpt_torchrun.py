"""Train a small GPT to sort digits, with plain torch DDP that reduces its gradients through gradwire.

    torchrun --nproc-per-node 2 examples/gpt_torchrun.py                  # two ranks on this machine
    torchrun --nproc-per-node 2 examples/gpt_torchrun.py --backend gloo   # the same on Gloo
    gradwire run -n 2 examples/gpt_torchrun.py                            # started by gradwire
    python examples/gpt_torchrun.py                                       # one rank

The script does not import gradwire. An existing script needs only the name of the backend. Then its steps spend less
time on communication, and if a rank dies, all other ranks raise an error that names it within a second.

The model reads eight digits and a separator, and writes the digits in order. At the end the ranks compare weights.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LENGTH, DIGITS = 8, 6
MARK = DIGITS  # the separator between question and answer
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 128  # samples per step, over all ranks


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


def questions(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random digits followed by the separator, and the same digits in order."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=random)
    return torch.cat([digits, torch.full((count, 1), MARK)], 1), digits.sort(1).values


def answers(model: nn.Module, asked: Tensor) -> Tensor:
    """Return what the model writes, digit by digit."""
    text = asked
    for _ in range(LENGTH):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text[:, asked.shape[1] :]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="gradwire", help="backend of torch.distributed (default: gradwire)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without a launcher there is one rank
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(1 + rank)  # each rank has different questions
    began = time.perf_counter()
    for step in range(arguments.steps):
        asked, right = questions(BATCH // size, random)
        logits = model(torch.cat([asked, right[:, :-1]], 1))[:, LENGTH:]
        loss = functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()  # also averages the gradients over all ranks
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - began

    with torch.no_grad():
        asked, right = questions(200, torch.Generator().manual_seed(0))
        sorted_well = (answers(model.module, asked) == right).all(1).float().mean().item()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    copies = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(copies, weights)
    identical = all(torch.equal(copy, weights) for copy in copies)
    if rank == 0:
        print(f"{size} ranks, {arguments.backend}: {seconds / arguments.steps * 1e3:.1f} ms per step", flush=True)
        print(f"{sorted_well:.0%} of new questions sorted without a mistake", flush=True)
        print(f"the weights are {'identical' if identical else 'NOT identical'} on all ranks", flush=True)
    dist.destroy_process_group()
    return 0 if identical and sorted_well > 0.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
