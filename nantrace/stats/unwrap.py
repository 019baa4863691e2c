"""From whatever calls itself a tensor to plain strided values, or to the reason why there are none to read.

Knows PyTorch's wrappers and layouts; counts nothing. Runs no operation on a wrapper: with dispatch to Python off, the
kernel would read memory that a wrapper doesn't have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: What `type(tensor)` is when nobody overrides anything.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_UNREADABLE_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bit", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
        *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
    )
    if hasattr(torch, name)
)


class UnreadableError(Exception):
    """The values of a tensor cannot be read; its text says why."""


@contextmanager
def quiet() -> Iterator[None]:
    """Runs operations that no mode, subclass, transform or autograd of the user sees, on this thread."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableFuncTorch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the values: of a DTensor its local shard, of a functorch wrapper what it wraps.

    A jagged nested tensor is returned as it is. Call within `quiet`.

    Raises:
        UnreadableError: there are no values, or only code of the subclass could produce them.
    """
    while True:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        elif torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        elif type(tensor) in PLAIN:
            return tensor
        else:
            inner: torch.Tensor = _inside(tensor)
            if inner is tensor:
                return inner
            tensor = inner


def _inside(tensor: Any) -> Any:
    cls = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise UnreadableError("it is an uninitialized parameter")
    if cls.__name__ == "FakeTensor":
        raise UnreadableError("it is a fake tensor, which holds no values")
    if cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl or not hasattr(cls, "__tensor_flatten__"):
        return _without_subclass(tensor)
    if cls.__name__ == "NestedTensor":
        return tensor
    if cls.__name__ == "AsyncCollectiveTensor" and not tensor.completed:
        raise UnreadableError("it is the result of a collective that nobody waited for yet")
    names, _ = tensor.__tensor_flatten__()
    parts = [part for part in (getattr(tensor, name) for name in names) if isinstance(part, torch.Tensor)]
    if len(parts) != 1 or parts[0].dtype != tensor.dtype:
        raise UnreadableError(f"only the code of its class {cls.__name__} can produce its values")
    return parts[0]


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """The alias without the subclass; a wrapper (it has a dispatch of its own and no memory) has none."""
    if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() and not tensor.data_ptr():
        cls = type(tensor)
        if cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise UnreadableError(f"only the code of its class {cls.__name__} can produce its values")
    return tensor.as_subclass(torch.Tensor)


def check_readable(tensor: torch.Tensor) -> None:
    """Raises `UnreadableError` if a plain strided tensor has no values behind it."""
    if tensor.is_meta:
        raise UnreadableError("it is a meta tensor, which holds no values")
    if tensor.dtype in _UNREADABLE_DTYPES:
        raise UnreadableError(f"elements of dtype {tensor.dtype} are bits, not numbers")
    numel = tensor.numel()
    if numel == 0 or tensor._is_zerotensor():
        return
    span = numel if tensor.is_contiguous() else 1 + _last(tensor)
    needed, held = (tensor.storage_offset() + span) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if held < needed:
        raise UnreadableError(f"its storage was freed: it holds {held} bytes of the {needed} that it needs")


def _last(tensor: torch.Tensor) -> int:
    """How far behind the first element the last one in memory lies."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without lazy conjugation and negation: itself, or a copy."""
    if tensor.is_conj():
        parts = torch.view_as_real(tensor.conj()).clone()  # as real numbers: copying complex32 warns
        parts[..., 1].neg_()
        return torch.view_as_complex(parts)
    return tensor.resolve_neg()
