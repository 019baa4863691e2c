"""The tail of an autograd graph: what was done to a loss between the model and the root of backward.

Reads names, dtypes and constants of nodes; unpacks nothing that autograd saved, and keeps no node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: Losses that autocast computes in float32 on every device, by their autograd nodes. One of them in half precision was
#: computed where autocast was off.
_FLOAT32_LOSSES = frozenset(
    f"{name}Backward0"
    for name in (
        "BinaryCrossEntropyWithLogits",
        "MseLoss",
        "MultiMarginLoss",
        "NllLoss",
        "NllLoss2D",
        "SmoothL1Loss",
        "SoftMarginLoss",
    )
)
_PROBABILITIES = "BinaryCrossEntropyBackward0"
_FACTORS = ("MulBackward0", "DivBackward0")
HALF = (torch.float16, torch.bfloat16)
_MOST_NODES = 64
#: Sequence number of the nodes that accumulate gradients.
_LEAF = 2**64 - 1


@dataclass(frozen=True)
class Factor:
    """A constant by which a loss was multiplied.

    Attributes:
        value: None where it lies on a device or cannot be read without unpacking.
        address: of a tensor that was multiplied with or divided by; None for a number.
        divides: the loss was divided by the tensor at `address`. A number is the reciprocal then already.
    """

    value: float | None
    address: int | None = None
    divides: bool = False


@dataclass(frozen=True)
class Tail:
    """What the last nodes before a root say.

    Attributes:
        half_losses: (node, dtype) of losses that were computed in half precision where autocast was off.
        half_probabilities: dtype of the probabilities that `binary_cross_entropy` read, where it was a half precision.
    """

    half_losses: tuple[tuple[str, str], ...] = ()
    half_probabilities: str | None = None


def tail_of(root: torch.Tensor) -> Tail:
    """Look at the last few nodes before `root`, but not behind a loss."""
    losses: dict[tuple[str, str], None] = {}
    probabilities: str | None = None
    for node in _last_nodes(root.grad_fn):
        if node.name() == _PROBABILITIES:
            probabilities = probabilities or _half_input(node)
        elif node.name() in _FLOAT32_LOSSES and _dtype(node) in HALF:
            losses[node.name(), word(_dtype(node))] = None
    return Tail(tuple(losses), probabilities)


def reaches(root: torch.Tensor, numbers: set[int]) -> bool | None:
    """Whether a node with one of these sequence numbers leads to `root`; None if that would take too long to say.

    A node is made after all that it reads, so what has a smaller number than the smallest wanted needs no look.
    """
    if not numbers:
        return False
    least, left = min(numbers), [root.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        number = sequence_number(node)
        if number is None:
            return None
        if number in numbers:
            return True
        if number == _LEAF or number < least:
            continue
        if len(seen) == _MOST_NODES:
            return None
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def factors_before(tensor: torch.Tensor, stop: set[int]) -> tuple[Factor, ...]:
    """The constants that `tensor` was last multiplied with or divided by, up to a node whose number is in `stop`."""
    found: list[Factor] = []
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _FACTORS and sequence_number(node) not in stop:
        parents = [before for before, _ in node.next_functions if before is not None]
        if len(parents) != 1 or len(found) == _MOST_NODES:
            break
        found.append(_factor(node))
        node = parents[0]
    return tuple(found)


def sequence_number(node: Any) -> int | None:
    """When the node was made, among those of its thread."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def may_be_scaled(root: torch.Tensor) -> bool:
    """Whether the last nodes hold a constant factor that is large, or unknown: a scale by hand."""
    for node in _last_nodes(root.grad_fn):
        if node.name() in _FACTORS and sum(before is not None for before, _ in node.next_functions) == 1:
            value = _factor(node).value
            if value is None or abs(value) > 8:
                return True
    return False


def _last_nodes(node: Any) -> Iterator[Any]:
    """Breadth first, at most so many; not behind a loss."""
    seen, left = {node}, [node]
    for node in left:
        if node is None:
            continue
        yield node
        if node.name() in _FLOAT32_LOSSES:
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(seen) < _MOST_NODES:
                seen.add(before)
                left.append(before)


def _half_input(node: Any) -> str | None:
    """The half precision in which the input of a loss was computed, if it was, through casts and views."""
    for _ in range(8):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return None
        if _dtype(node) in HALF:
            return word(_dtype(node))
        if node.name() not in ("ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0"):
            return None
    return None


def _factor(node: Any) -> Factor:
    raw = getattr(node, "_raw_saved_other", None)
    other = None if raw is None or getattr(raw, "unpack_hook", None) is not None else getattr(raw, "data", None)
    divides = node.name() == "DivBackward0"
    if not isinstance(other, torch.Tensor) or other.numel() != 1:
        return Factor(None)
    address = other.data_ptr()
    if other.device.type != "cpu":
        return Factor(None, address, divides)
    # `tolist`: under a dispatch mode, which records ops, PyTorch hands a Python number's tensor on as the bare number.
    plain: Any = other.tolist() if other.dim() == 0 else other.detach()
    value = float(plain)
    if divides:
        value = 1 / value if value else float("inf")
    return Factor(value, address, divides)


def _dtype(node: Any) -> torch.dtype | None:
    metadata = getattr(node, "_input_metadata", None)
    return metadata[0].dtype if metadata else None


def word(dtype: torch.dtype | None) -> str:
    """How a dtype is called: "float16"."""
    return str(dtype).removeprefix("torch.")
