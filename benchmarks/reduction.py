"""What measuring a tensor costs, against the barest pass over the same elements.

On a CPU the bare pass is `torch.aminmax` of a contiguous tensor of the same dtype and number of elements (of bytes for
float8), on CUDA a copy. Each repetition times the bare pass and every case once, in turn, so that a ratio compares
neighbours in time; a row of the CSV holds the 20th, 50th and 80th percentile of the ratios and the median speed.

    OMP_NUM_THREADS=1 python benchmarks/reduction.py --device cpu
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nantrace.stats.host import row
from nantrace.stats.policy import table_for

DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "complex64")
SIZES = {"64": 64, "64Ki": 1 << 16, "1Mi": 1 << 20, "16Mi": 1 << 24}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda flat: flat,
    "transposed": lambda flat: flat.view(8, -1).t(),
    "channels_last": lambda flat: flat.view(2, 4, -1, 8).permute(0, 3, 1, 2),
    "sliced": lambda flat: flat.view(8, -1)[:, : flat.numel() // 16],
}
COLUMNS = (
    "device",
    "dtype",
    "elements",
    "layout",
    "nonfinite",
    "columns",
    "repetitions",
    "microseconds",
    "gigabytes_per_second",
    "speed_ratio_p20",
    "speed_ratio_p50",
    "speed_ratio_p80",
    "machine",
    "torch",
    "date",
)


def filled(dtype: str, count: int, nonfinite: str, device: torch.device) -> torch.Tensor:
    """A flat tensor of normal numbers; NaN are none of them, few, or all."""
    kind = getattr(torch, dtype)
    real = torch.randn(count * (2 if kind.is_complex else 1), generator=torch.Generator().manual_seed(0))
    if nonfinite == "all":
        real.fill_(float("nan"))
    elif nonfinite == "few":
        real[len(real) // 3 :: 1_000_000] = float("nan")
    values = torch.view_as_complex(real.view(-1, 2)) if kind.is_complex else real.to(kind)
    return values.to(device)


def bare_pass(flat: torch.Tensor) -> Callable[[], object]:
    """One pass over as many contiguous elements, without a measurement."""
    if flat.is_cuda:
        target = torch.empty_like(flat)
        return lambda: target.copy_(flat)
    plain = torch.view_as_real(flat) if flat.is_complex() else flat
    plain = plain.view(torch.uint8) if plain.element_size() == 1 else plain
    return lambda: torch.aminmax(plain)


def measuring(tensor: torch.Tensor, full: bool) -> Callable[[], object]:
    """What a hook does with a tensor."""
    if not tensor.is_cuda:
        return lambda: row(tensor, full)
    table = table_for(tensor.device)
    return lambda: table.add(tensor, full)


def seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean time of one of `times` calls, the device's work included."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / times


def measure(device: torch.device, dtype: str, count: int, repetitions: int) -> Iterator[dict[str, object]]:
    """The rows of one dtype and size."""
    cases = {}
    for nonfinite in ("none", "few", "all"):
        flat = filled(dtype, count, nonfinite, device)
        for layout in LAYOUTS if nonfinite == "none" else ("contiguous",):
            tensor = LAYOUTS[layout](flat)
            for full in (False, True):
                key = (layout, nonfinite, "full" if full else "range")
                cases[key] = (measuring(tensor, full), tensor.numel() * tensor.element_size())
    flat = filled(dtype, count, "none", device)
    bare, size = bare_pass(flat), flat.numel() * flat.element_size()
    times = max(1, min(200, (1 << 20) // count))
    speeds: dict[tuple[str, str, str], list[tuple[float, float]]] = {key: [] for key in cases}
    for repetition in range(repetitions + 1):
        base = size / seconds(bare, times, device)
        for key, (work, nbytes) in cases.items():
            speed = nbytes / seconds(work, times, device)
            if repetition:  # the first one warms up
                speeds[key].append((speed, speed / base))
    for (layout, nonfinite, columns), pairs in speeds.items():
        speed = statistics.median(pair[0] for pair in pairs)
        ratios = statistics.quantiles([pair[1] for pair in pairs], n=5, method="inclusive")
        nbytes = cases[layout, nonfinite, columns][1]
        yield {
            "dtype": dtype,
            "elements": count,
            "layout": layout,
            "nonfinite": nonfinite,
            "columns": columns,
            "repetitions": repetitions,
            "microseconds": f"{nbytes / speed * 1e6:.2f}",
            "gigabytes_per_second": f"{speed / 1e9:.3f}",
            "speed_ratio_p20": f"{ratios[0]:.3f}",
            "speed_ratio_p50": f"{statistics.median(pair[1] for pair in pairs):.3f}",
            "speed_ratio_p80": f"{ratios[3]:.3f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--sizes", nargs="+", default=tuple(SIZES), choices=tuple(SIZES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    out = options.out or Path(__file__).parent / "results" / f"reduction-{device.type}.csv"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for dtype in options.dtypes:
            for size in options.sizes:
                for line in measure(device, dtype, SIZES[size], options.repetitions):
                    machine = f"{platform.machine()} {platform.system()}"
                    writer.writerow(
                        {
                            **line,
                            "device": name,
                            "machine": machine,
                            "torch": torch.__version__,
                            "date": datetime.date.today().isoformat(),
                        }
                    )
                    print(*list(line.values()), sep=",")
                file.flush()


if __name__ == "__main__":
    main()
