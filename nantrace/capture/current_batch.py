"""What the open step reads, as far as it was handed over: at the block's begin, or step by step in a loop.

Tells whoever keeps it, and looks into that of a step that failed. Knows no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.ledger.batch_check import check_batch
from nantrace.capture.ledger.open_step import OpenStep, is_finite
from nantrace.events import Role, Site, nonfinite_rows

_CHECKS = 8  # of failed steps that are looked into


class CurrentBatch:
    """The batch of the open step, or of the one that comes.

    Args:
        value: a tensor or any nesting of them, or None.
        told: called with a batch, and whether it was handed over at this moment (else the step first calls something).

    Attributes:
        value: the batch that was handed over last.
    """

    def __init__(self, value: Any, told: Callable[[Any, bool], None]) -> None:
        self.value = value
        self._told = told
        self._checks = _CHECKS

    def hand_over(self, step: OpenStep) -> None:
        """The value was handed over for this step, just now."""
        step.batches += 1
        self._told(self.value, True)

    def is_read(self, step: OpenStep) -> None:
        """The step makes its first call: what it reads is known now, if it was not handed over for this step."""
        if not step.batches:
            self._told(self.value, False)

    def check(self, step: OpenStep, rows: npt.NDArray[np.void], sites: Iterable[Site]) -> None:
        """Look into the batch of a step that failed: of the first few only, which may wait for the device."""
        if self.value is None or not self._checks:
            return
        if nonfinite_rows(rows).any() or step.skipped() or not is_finite(step.root):
            self._checks -= 1
            dtypes = {site.dtype for site in sites if site.role is Role.OUTPUT}
            halves = [dtype for dtype in (torch.float16, torch.bfloat16) if str(dtype).removeprefix("torch.") in dtypes]
            step.batch_check += check_batch(self.value, halves)
