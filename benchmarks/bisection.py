"""What a bisection costs: replays, and wall time as a multiple of the bare step. `python benchmarks/bisection.py`

Each model overflows in its middle layer. A row holds the median over repetitions of (time of bisect) / (time of the
bare step measured just before it; one repetition for the largest); it includes backward and the optimizer. Writes
`benchmarks/results/bisection-cpu.csv`. The largest takes minutes.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from nantrace.replay.bisect import bisect
from nantrace.replay.step import Step

RESULTS = Path(__file__).parent / "results" / "bisection-cpu.csv"
FIELDS = (
    "model",
    "modules",
    "ops_watched",
    "status",
    "op",
    "replays",
    "step_ms",
    "bisect_ms",
    "multiple",
    "torch",
    "date",
)


class Overflow(nn.Module):
    """Overflows float32 in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e30).pow(2)


class Block(nn.Module):
    """A pre-norm transformer block as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


def chain(sites: int) -> tuple[nn.Module, Tensor]:
    """Linear and tanh in turn, with the fault in the middle."""
    layers: list[nn.Module] = [nn.Tanh() if i % 2 else nn.Linear(16, 16) for i in range(sites)]
    layers[(sites // 2) | 1] = Overflow()  # a linear layer follows: tanh would contain it
    return nn.Sequential(*layers), torch.randn(8, 16)


def gpt2(layers: int = 6, width: int = 256) -> tuple[nn.Module, Tensor]:
    blocks: list[nn.Module] = [Block(width, 4) for _ in range(layers)]
    blocks.insert(layers // 2, Overflow())
    return nn.Sequential(*blocks), torch.randn(4, 128, width)


def step_of(model: nn.Module, batch: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def run(m: nn.Module, b: Tensor) -> None:
        optimizer.zero_grad()
        m(b).mean().backward()
        optimizer.step()

    return Step(run, model, batch, optimizer=optimizer)


def measure(name: str, model: nn.Module, batch: Tensor, repetitions: int) -> dict[str, object]:
    pairs = []
    for _ in range(repetitions):
        bare = step_of(model, batch)
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        began = time.perf_counter()
        bare()
        step_seconds = time.perf_counter() - began
        model.load_state_dict(kept)
        model.zero_grad()
        began = time.perf_counter()
        verdict = bisect(step_of(model, batch))
        pairs.append((step_seconds, time.perf_counter() - began))
    modules = sum(1 for _ in model.modules())
    return {
        "model": name,
        "modules": modules,
        "ops_watched": "of one region" if any("Not every op" in said for said in verdict.evidence) else "all",
        "status": verdict.status,
        "op": verdict.origin.op if verdict.origin else None,
        "replays": verdict.replays,
        "step_ms": round(1e3 * statistics.median(step for step, _ in pairs), 2),
        "bisect_ms": round(1e3 * statistics.median(whole for _, whole in pairs), 2),
        "multiple": round(statistics.median(whole / step for step, whole in pairs), 1),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {"GPT-2 like, 6 layers of 256": gpt2()}
    models |= {f"chain of {sites}": chain(sites) for sites in (10, 100, 1000, 10_000)}
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for name, (model, batch) in models.items():
            row = measure(name, model, batch, 1 if name == "chain of 10000" else options.repetitions)
            writer.writerow(row)
            file.flush()
            print(*row.values(), sep="  ")


if __name__ == "__main__":
    main()
