"""Launches by Triton's own launcher in C, on a libcuda without a device (no_device.c), which prints what it is given.

Run by test_fused_launches.py as a program of its own. Prints the addresses of tensor and table, then three launches of
which the third is direct, the same by Triton alone, and a direct one with a number of more than 32 bits.
"""

from __future__ import annotations

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from nantrace.stats import fused, fused_launch
from tests.stats.launch_scenarios import Driver, only_triton


class CDriver(Driver):
    """One that launches."""

    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        super().__init__()
        self.utils = CudaUtils()


def main() -> None:
    driver.set_active(CDriver())
    tensor, rows = torch.zeros(5000), torch.zeros(16, fused.WIDTH, dtype=torch.int64)
    print(tensor.data_ptr(), rows.data_ptr(), flush=True)
    for _ in range(3):
        fused_launch.launch(tensor, 5000, rows, 7)
    with only_triton():
        fused_launch.launch(tensor, 5000, rows, 7)
    assert fused_launch.relaunch(tensor.dtype, tensor.data_ptr(), 2**33, -1, rows.data_ptr(), 7)


if __name__ == "__main__":
    main()
