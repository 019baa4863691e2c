"""What a tensor holds: which memory it stands on, whether all of it is finite, and where it is not.

Knows nothing about ops or training. Everything here reads and never writes, and must be called where no dispatch mode
listens (inside a mode's own handler, or under `torch._C._DisableTorchDispatch`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nantrace.flow.marked import all_of, count, none_of
from nantrace.stats.formats import REAL_FORMATS
from nantrace.stats.host import extent_output, row
from nantrace.stats.layout import array_of

FLOATS = frozenset(
    d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)
)
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
#: Their values are counted as not read.
QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
_PLAIN = (Tensor, torch.nn.Parameter)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
#: Of dtypes whose bits read as signed integers: these, and the bits of the two infinities. NaNs lie beyond either.
_BITS = {
    torch.float32: (torch.int32, 0xFF << 23, -(1 << 23)),
    torch.float64: (torch.int64, 0x7FF << 52, -(1 << 52)),
    torch.float16: (torch.int16, 0x1F << 10, -(1 << 10)),
    torch.bfloat16: (torch.int16, 0xFF << 7, -(1 << 7)),
}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
#: From this many elements on one pass of `sum` is cheaper than `aminmax`, which has less to set up.
SMALL = 1 << 13


class unseen:
    """Nothing read in here is recorded, differentiated or dispatched to a mode."""

    def __enter__(self) -> None:
        self._modes = (torch.no_grad(), torch._C._DisableTorchDispatch())
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def storage_key(tensor: Tensor) -> int | None:
    """Identity of the memory under a strided tensor, whatever view of it this is; None where there is none."""
    try:
        key: int = local(tensor).untyped_storage()._cdata
        return key
    except Exception:  # sparse, nested, quantized, functorch: each raises another error
        return None


def local(tensor: Tensor) -> Tensor:
    """Of a DTensor this rank's shard, which alone has memory; other tensors as they are."""
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)


def planes(tensor: Tensor, unread: dict[str, int] | None = None) -> tuple[Tensor, ...]:
    """The dense floating tensors that hold the data of `tensor`; empty if there is nothing to read.

    A tensor that cannot be read is counted in `unread` under the reason. A ZeroTensor (forward-mode AD makes them) has
    no memory and holds zeros: nothing to read, nothing to count.
    """
    if type(tensor) in _PLAIN:
        if tensor.is_cpu and tensor.dtype in FLOATS and not tensor.is_nested:
            try:
                holds = tensor.untyped_storage().nbytes() and tensor.numel() and not tensor._is_zerotensor()
                return (tensor,) if holds else ()
            except RuntimeError:  # sparse tensors and functorch's wrappers have no storage to ask
                pass
    else:
        tensor = local(tensor)
    if tensor.dtype not in FLOATS:
        return _refused("quantized", unread) if tensor.is_quantized else ()
    reason = _unreadable(tensor)
    if reason is not None:
        return _refused(reason, unread) if reason else ()
    if tensor.layout is torch.strided:
        return (tensor,)
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return (values,) if values.numel() else ()


def _refused(reason: str, unread: dict[str, int] | None) -> tuple[Tensor, ...]:
    if unread is not None:
        unread[reason] = unread.get(reason, 0) + 1
    return ()


def _unreadable(tensor: Tensor) -> str | None:
    """Why the values cannot be read; "" if there are none; None if they can."""
    if tensor.is_meta:
        return "meta"
    if type(tensor).__name__ == "FakeTensor":
        return "fake"
    if tensor.is_nested:
        return "nested"
    if tensor._is_zerotensor():
        return ""
    if tensor.layout is torch.strided:
        if _is_wrapped(tensor):
            return "functorch"
        return "" if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0 else None
    return None if tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED else str(tensor.layout)


def unwrapped(tensor: Tensor) -> Tensor:
    """The plain tensor inside functorch's wrappers."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def readable(plane: Tensor) -> Tensor:
    """The same values in a form that every statistic takes: real, at least 2 bytes wide, each stored value once."""
    if plane.requires_grad and torch.is_grad_enabled():
        plane = plane.detach()
    if plane.dtype in REAL_FORMATS and plane.is_contiguous():
        return plane
    if plane.is_complex():
        plane = torch.view_as_real(plane.resolve_conj())
    if plane.element_size() == 1:
        plane = plane.float()  # float8 has no aminmax, and isnan not for every format
    if 0 in plane.stride():
        plane = plane[
            tuple(0 if s == 0 and n > 1 else slice(None) for n, s in zip(plane.shape, plane.stride(), strict=True))
        ]
    if not plane.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense.default(plane):
        plane = plane.as_strided((plane.numel(),), (1,), plane.storage_offset())
    return plane


class Scanner:
    """Tells whether a plane is finite throughout.

    Attributes:
        outputs: preallocated results of `torch.aminmax` by dtype, those met so far; see `extent_output`.
    """

    def __init__(self) -> None:
        self.outputs: dict[torch.dtype, tuple[tuple[Tensor, Tensor], Any]] = {}

    def nonfinite(self, plane: Tensor) -> Masks | None:
        """What is not finite in it; None if all of it is."""
        if is_all_nan(plane):  # asked first: so are most that are bad at all, and it takes next to nothing of others
            return _all_nan(plane)
        return None if self.is_finite(plane) else masks(plane)

    def is_finite(self, plane: Tensor) -> bool:
        """One pass. `aminmax` propagates NaN, so two finite ends prove every element finite; so does a finite sum."""
        dtype = plane.dtype
        if dtype is not torch.float32 and (dtype.is_complex or dtype.itemsize == 1):
            plane = readable(plane)
        elif plane.numel() >= SMALL:
            if not plane.is_contiguous():
                plane = readable(plane)
            if dtype is torch.float32 or dtype is torch.float64:
                total = plane.sum().item()
                if total - total == 0:
                    return True
                if total != total and is_all_nan(plane):
                    return False
        low, high = self.extent(plane)
        return low - low == 0 and high - high == 0

    def extent(self, plane: Tensor) -> tuple[float, float]:
        """(smallest, largest) of a readable plane; NaN twice if it holds a NaN."""
        if not plane.is_cpu:
            low, high = torch.aminmax(plane)
            return low.item(), high.item()
        output = self.outputs.get(plane.dtype)
        if output is None:
            output = self.outputs[plane.dtype] = extent_output(plane.dtype)
        torch.aminmax(plane, out=output[0])
        ends: list[float] = output[1].tolist()
        return ends[0], ends[1]


@dataclass(frozen=True)
class Masks:
    """Which elements of a plane are NaN and which are infinite, as boolean tensors of its shape, and how many."""

    nan_mask: Tensor
    inf_mask: Tensor
    nan: int
    posinf: int
    neginf: int

    @functools.cached_property
    def bad(self) -> Tensor:
        if not self.posinf and not self.neginf:
            return self.nan_mask
        return self.nan_mask | self.inf_mask if self.nan else self.inf_mask

    @property
    def count(self) -> int:
        """How many elements are nonfinite."""
        return self.nan + self.posinf + self.neginf

    def within(self, mask: Tensor, plane: Tensor) -> Masks:
        """Those of these elements of `plane` that `mask` selects."""
        nan_mask, inf_mask = self.nan_mask & mask, self.inf_mask & mask
        infinities = count(inf_mask)
        negative = count(inf_mask & (plane.detach() == -math.inf)) if self.neginf else 0
        return Masks(nan_mask, inf_mask, count(nan_mask), infinities - negative, negative)


def _is_plain_on_host(plane: Tensor) -> bool:
    return type(plane) in _PLAIN and plane.is_cpu and plane.layout is torch.strided and not plane.is_neg()


def is_all_nan(plane: Tensor) -> bool:
    """Whether every element is NaN, told in one pass over the bits. In doubt (NaNs of both signs, a device), not."""
    bits = _BITS.get(plane.dtype)
    if bits is None or not _is_plain_on_host(plane) or not plane.numel():
        return False
    plane = plane.detach()
    first = plane.as_strided((), ()).item()
    if first == first:
        return False
    integers, infinity, negative_infinity = bits
    low, high = (int(end) for end in torch.aminmax(readable(plane).view(integers)))
    return low > infinity or (low > negative_infinity and high < 0)


def _all_nan(plane: Tensor) -> Masks:
    return Masks(all_of(plane.shape), none_of(plane.shape), plane.numel(), 0, 0)


def masks(plane: Tensor) -> Masks:
    """Complex: an element is NaN if a part is, else infinite if a part is; its infinities count as positive."""
    plane = plane.detach()
    if plane.element_size() == 1:
        plane = plane.float()
    if is_all_nan(plane):
        return _all_nan(plane)
    if plane.dtype in (torch.float32, torch.float64) and _is_plain_on_host(plane):
        return _masks_of_array(plane)
    nan_mask, inf_mask = torch.isnan(plane), torch.isinf(plane)
    nan = count(nan_mask)
    if plane.is_complex():
        inf_mask = inf_mask & ~nan_mask
        return Masks(nan_mask, inf_mask, nan, count(inf_mask), 0)
    infinities = count(inf_mask)
    negative = count(plane == -math.inf) if infinities else 0
    return Masks(nan_mask, inf_mask, nan, infinities - negative, negative)


def _masks_of_array(plane: Tensor) -> Masks:
    """The same by NumPy, which takes a tenth of the time on the host."""
    array = array_of(plane)
    nan, inf = np.asarray(np.isnan(array)), np.asarray(np.isinf(array))
    infinities = int(np.count_nonzero(inf))
    negative = int(np.count_nonzero(array == -np.inf)) if infinities else 0
    return Masks(
        torch.from_numpy(nan), torch.from_numpy(inf), int(np.count_nonzero(nan)), infinities - negative, negative
    )


@dataclass(frozen=True)
class Summary:
    """Statistics of one plane, for an event's row or operand; None where no such element exists or was not measured."""

    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    min: float | None = None
    max: float | None = None
    absmin: float | None = None
    zero: int | None = None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summarize(plane: Tensor) -> Summary:
    """Exact counts, and minimum, maximum and smallest nonzero magnitude over the finite elements."""
    _, finite, nan, posinf, neginf, low, high, absmin, _, zero, *_ = row(plane, full=True)
    return Summary(
        dtype_name(plane.dtype),
        tuple(plane.shape),
        nan,
        posinf,
        neginf,
        low if finite else None,
        high if finite else None,
        absmin if absmin == absmin else None,
        zero,
    )


def tensors_in(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested containers, dataclasses and plain objects, with its path: "batch.x[0]"."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth > 8 or isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = getattr(value, "_fields", None)  # a named tuple
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{names[index]}" if names else f"{path}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not callable(value)):
        for key, item in vars(value).items():
            yield from tensors_in(item, f"{path}.{key}", depth + 1)
