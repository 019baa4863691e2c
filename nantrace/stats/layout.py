"""The elements of a strided tensor in the order of their memory. Knows shapes and strides; reads no value.

Counts and extremes don't depend on order, and memory order is the fast one: 10 times for a transposed tensor. What
does depend on it, the flat index of the first nonfinite element, is translated back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Layout:
    """A tensor's elements in memory order.

    Attributes:
        elements: a view without repeated dimensions, largest stride first; of one dimension if it has no gaps.
        repeats: how often the tensor shows each of these elements (product of its expanded dimensions).
        sizes: sizes of the remaining dimensions, in the order of `elements`.
        places: for each of them, how far one step moves in the tensor's own row-major order.
    """

    elements: torch.Tensor
    repeats: int
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def ordered(self) -> bool:
        """Whether memory order is the row-major order of the tensor."""
        return all(a >= b for a, b in itertools.pairwise(self.places))

    def flat_index(self, positions: npt.NDArray[np.int64]) -> int:
        """The smallest row-major index among positions counted in the order of `elements`."""
        index = np.zeros(len(positions), dtype=np.int64)
        for size, place in zip(reversed(self.sizes), reversed(self.places), strict=True):
            positions, step = np.divmod(positions, size)
            index += step * place
        return int(index.min())


def lay_out(tensor: torch.Tensor) -> Layout:
    """Describes a strided tensor of one element or more."""
    dims, repeats, place = [], 1, tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        place //= size
        if stride == 0:
            repeats *= size
        elif size > 1:
            dims.append((stride, size, place))
    dims.sort(key=lambda dim: (-dim[0], -dim[2]))
    strides, sizes, places = tuple(zip(*dims, strict=True)) if dims else ((), (), ())
    count = math.prod(sizes)
    dense = all(stride == math.prod(sizes[i + 1 :]) for i, stride in enumerate(strides))
    if dense:
        elements = tensor.as_strided((count,), (1,), tensor.storage_offset())
    else:
        elements = tensor.as_strided(sizes, strides, tensor.storage_offset())
    return Layout(elements, repeats, sizes, places)


def row_major(layout: Layout) -> Layout:
    """The same elements in the tensor's own order."""
    order = sorted(range(len(layout.sizes)), key=lambda i: -layout.places[i])
    elements = layout.elements
    if elements.dim() != len(order):  # it was flattened
        elements = elements.view(layout.sizes)
    sizes, places = (tuple(values[i] for i in order) for values in (layout.sizes, layout.places))
    return Layout(elements.permute(order), layout.repeats, sizes, places)


def pieces(elements: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Contiguous pieces of at most `size` elements, in order; copies only what has gaps.

    A piece has shape (elements,), or (elements, 2) and a real dtype if the elements are complex.
    """
    count = elements.numel()
    if count <= size:
        yield _flat(elements)
    elif elements.dim() == 1:
        for start in range(0, count, size):
            yield _flat(elements[start : start + size])
    else:
        inner = count // elements.shape[0]
        if inner > size:
            for row in elements:
                yield from pieces(row, size)
        else:
            rows = size // inner
            for start in range(0, elements.shape[0], rows):
                yield _flat(elements[start : start + rows])


def _flat(elements: torch.Tensor) -> torch.Tensor:
    # As real numbers before the copy: copying complex32 warns.
    return torch.view_as_real(elements).reshape(-1, 2) if elements.is_complex() else elements.reshape(-1)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor on the host as a NumPy array, without a copy.

    `Tensor.numpy()` would mark the storage as one that can never be resized again, and a later `resize_` of the user's
    (or of FSDP's) would fail.
    """
    array: npt.NDArray[Any] = np.from_dlpack(tensor)
    return array
