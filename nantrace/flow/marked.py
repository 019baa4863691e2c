"""Boolean tensors that mark elements: how many, where the first, and in what short form. Knows no values and no ops.

On the host NumPy reads and makes them: PyTorch's comparisons and reductions of booleans take ten times as long there.
None of these tensors is ever written to again, so that one element can stand for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALL, _NONE = torch.ones((), dtype=torch.bool), torch.zeros((), dtype=torch.bool)


def all_of(shape: Sequence[int]) -> Tensor:
    """Every element of a tensor on the host is marked; takes no memory."""
    return _ALL.expand(shape)


def none_of(shape: Sequence[int]) -> Tensor:
    """No element of a tensor on the host is marked; takes no memory."""
    return _NONE.expand(shape)


def once(mask: Tensor) -> Tensor:
    """Of dimensions that repeat the same memory one row: it expands to the mask again."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def marks_all(mask: Tensor) -> bool:
    """Whether the mask is known, at a glance, to mark every element; in doubt, not."""
    short = once(mask)
    return short.numel() == 1 and bool(short)


def _on_host(mask: Tensor) -> bool:
    return type(mask) is Tensor and mask.is_cpu


def marks_any(mask: Tensor) -> bool:
    return bool(mask.numpy().any() if _on_host(mask) else mask.any())


def count(mask: Tensor) -> int:
    """How many elements are marked."""
    return int(np.count_nonzero(mask.numpy()) if _on_host(mask) else torch.count_nonzero(mask))


def first(mask: Tensor) -> int:
    """Row-major index of the first marked element; 0 if none is."""
    flat = mask.reshape(-1)
    return int(flat.numpy().argmax() if _on_host(flat) else flat.to(torch.uint8).argmax())


def covers(mask: Tensor, other: Tensor) -> bool:
    """Whether all that `other` marks is marked in `mask`, which has the same shape; `other` marks something."""
    short = once(mask)
    if short.numel() == 1:
        return bool(short)
    return not marks_any(~short) if marks_all(other) else not marks_any(other & ~mask)


def equal(numbers: Tensor, number: int) -> Tensor:
    """Marks the elements of an integer tensor that equal `number`."""
    if not _on_host(numbers):
        return numbers == number
    return torch.from_numpy(np.asarray(numbers.numpy() == number))
