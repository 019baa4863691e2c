"""Which way of measuring serves which device. Knows no numbers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from nantrace.stats.deferred import DeviceTable

if TYPE_CHECKING:
    from nantrace.stats.fused_table import FusedTable


def table_for(device: torch.device) -> DeviceTable | FusedTable:
    """A table for the rows of tensors on an asynchronous device: one pass a tensor where Triton is, else several."""
    if device.type == "cuda" and torch.version.cuda and importlib.util.find_spec("triton"):
        from nantrace.stats.fused_table import FusedTable  # imports triton

        return FusedTable(device)
    return DeviceTable(device)
