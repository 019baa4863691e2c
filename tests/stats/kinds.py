"""Tensors that are not plain memory: wrapped, sparse, lazy, or without values. Used by the tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

_INF = float("inf")


def _numbers() -> torch.Tensor:
    return torch.tensor([[1.0, -2.0], [_INF, 0.0]])


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are new
        return torch.nested.nested_tensor([_numbers(), _numbers()[:1]], layout=torch.strided)


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([_numbers(), _numbers()[:1]], layout=torch.jagged)


def _with_holes() -> torch.Tensor:
    values = torch.tensor([1.0, float("nan"), 3.0, 4.0, _INF])
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]), lengths=torch.tensor([1, 3]))


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they will be gone
        return torch.quantize_per_tensor(torch.tensor([0.5, -1.0, 0.0]), 0.25, 0, torch.qint8)


def _compressed(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is new
        return _sparse_values().to_sparse(layout=layout)


def _sparse_values() -> torch.Tensor:
    return torch.tensor([[0.0, 0.0, 2.0], [0.0, float("nan"), 0.0], [-3.0, 0.0, -_INF]])


def _fake() -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(2, 3)


def _freed() -> torch.Tensor:
    tensor = torch.ones(6)
    tensor.untyped_storage().resize_(0)
    return tensor


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _numbers() * 2


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own."""


_COMPLEX = torch.complex(_numbers(), torch.tensor([[3.0, -4.0], [1.0, 0.0]]))

#: Kind -> (how to make one, the plain tensor whose row it must have).
READABLE: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
    "nested": (_nested, torch.cat([_numbers(), _numbers()[:1]])),
    "jagged": (_jagged, torch.cat([_numbers(), _numbers()[:1]])),
    "quantized": (_quantized, torch.tensor([0.5, -1.0, 0.0])),
    "lazily conjugated": (lambda: _COMPLEX.conj(), _COMPLEX.conj().resolve_conj()),
    "conjugated complex32": (
        lambda: torch.view_as_complex(torch.view_as_real(_COMPLEX).half()).conj(),
        torch.view_as_complex(torch.view_as_real(_COMPLEX.conj().resolve_conj()).half()),
    ),
    "lazily negated": (lambda: _COMPLEX.conj().imag, -_COMPLEX.imag),
    "zero tensor": (lambda: torch._efficientzerotensor((3, 2)), torch.zeros(3, 2)),
    "parameter": (lambda: torch.nn.Parameter(_numbers()), _numbers()),
    "not a leaf": (lambda: torch.nn.Parameter(_numbers()) * 2, _numbers() * 2),
    "inference": (_inference, _numbers() * 2),
    "subclass": (lambda: _numbers().as_subclass(Tagged), _numbers()),
    "mkldnn": (lambda: torch.tensor([1.0, float("nan"), 3.0]).to_mkldnn(), torch.tensor([1.0, float("nan"), 3.0])),
    "huge by expansion": (lambda: torch.tensor(2.0).expand(3, 4, 5), torch.full((3, 4, 5), 2.0)),
}
#: The same for what only the host reads.
READABLE_ON_HOST: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
    "with holes": (_with_holes, torch.tensor([1.0, 3.0, 4.0, _INF])),
    "sparse COO": (lambda: _sparse_values().to_sparse(), _sparse_values()),
    "duplicates in COO": (
        lambda: torch.sparse_coo_tensor([[2, 0, 2]], [3e38, 1.0, 3e38], (4,), check_invariants=True),
        torch.tensor([1.0, 0.0, _INF, 0.0]),
    ),
    "dense dimensions in COO": (lambda: _sparse_values().to_sparse(1), _sparse_values()),
    "empty COO": (lambda: torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2)),
    "sparse CSR": (lambda: _compressed(torch.sparse_csr), _sparse_values()),
    "sparse CSC": (lambda: _compressed(torch.sparse_csc), _sparse_values()),
}
#: Kind -> (how to make one, its number of elements, a part of the reason why it cannot be read).
UNREADABLE: dict[str, tuple[Callable[[], torch.Tensor], int, str]] = {
    "meta": (lambda: torch.ones(5, device="meta"), 5, "meta tensor, which holds no values"),
    "fake": (_fake, 6, "fake tensor, which holds no values"),
    "freed": (_freed, 6, "its storage was freed: it holds 0 bytes of the 24 that it needs"),
    "uninitialized": (lambda: torch.nn.LazyLinear(3).weight, 0, "uninitialized parameter"),
}
