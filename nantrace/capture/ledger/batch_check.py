"""What is odd in the batch of a step that failed, by tensor name and sample: values, masks, targets, lengths.

Looks only once a step is known to have failed, so it may wait for the device. Changes nothing and has no opinion on
what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nantrace.capture.ledger.norms import values_of
from nantrace.capture.walk import tensors_in

_LARGEST = 2**26  # elements of a tensor that is looked into
_SAMPLES = 8  # that one finding names
_IGNORED = -100  # PyTorch's default `ignore_index`
_TARGETS = ("label", "labels", "target", "targets", "y")

Finding = dict[str, Any]


def check_batch(batch: Any, compute: Sequence[torch.dtype] = (), classes: int | None = None) -> list[Finding]:
    """What is odd in a batch. Call within `Quiet`.

    Args:
        batch: a tensor or any nesting of them.
        compute: dtypes in which the step computes; values beyond the narrowest do not fit.
        classes: how many there are, if a target that lies outside is to be named.

    Returns:
        One mapping a finding: "tensor", "finding" in words, "samples" (indices along dim 0, at most 8) and "count".
    """
    named = [(slot, tensor) for slot, tensor in tensors_in(batch, "batch", set()) if _is_readable(tensor)]
    found: list[Finding] = []
    for slot, tensor in named:
        leaf = slot.replace("]", "").replace("[", ".").rsplit(".", 1)[-1].lower()
        if "mask" in leaf:
            found += _mask(slot, tensor)
        elif tensor.is_floating_point():
            found += _numbers(slot, tensor, compute)
        elif leaf in _TARGETS:
            found += _target(slot, tensor, classes)
    return found + _lengths(named)


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = tensor if tensor.dtype is torch.bool or not tensor.is_floating_point() else values_of(tensor)
    strided = plain is tensor and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    return strided and tensor.layout is torch.strided and 0 < tensor.numel() <= _LARGEST and not tensor.is_complex()


def _numbers(slot: str, tensor: torch.Tensor, compute: Sequence[torch.dtype]) -> list[Finding]:
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    finite = torch.isfinite(rows)
    found = _finding(slot, "holds nonfinite values", ~finite.all(1), int((~finite).sum()))
    narrow = min((torch.finfo(dtype).max for dtype in compute if dtype.is_floating_point), default=None)
    if narrow is not None and torch.finfo(tensor.dtype).max > narrow:
        beyond = finite & (rows.abs() > narrow)
        found += _finding(slot, f"holds values beyond {narrow:g}", beyond.any(1), int(beyond.sum()))
    if rows.shape[1] > 1:
        constant = (rows == rows[:, :1]).all(1)
        found += _finding(slot, "is constant", constant, int(constant.sum()))
    if tensor.dim() > 2 and not found:
        channels = tensor.transpose(0, 1).reshape(tensor.shape[1], -1)
        flat = (channels == channels[:, :1]).all(1)
        if flat.any():
            some = ", ".join(map(str, flat.nonzero().flatten().tolist()[:_SAMPLES]))
            found.append({"tensor": slot, "finding": f"is constant in channel {some}", "count": int(flat.sum())})
    return found


def _mask(slot: str, tensor: torch.Tensor) -> list[Finding]:
    """Rows of a mask that let nothing through: False, 0, or of an additive mask -inf everywhere."""
    if tensor.dim() < 2:
        return []
    if tensor.is_floating_point() and bool((tensor <= 0).all()) and bool((tensor < -1).any()):
        closed = tensor <= -1e4
    else:
        closed = tensor == 0
    empty = closed.all(-1).reshape(tensor.shape[0], -1).any(1)
    return _finding(slot, "lets nothing through", empty, int(empty.sum()))


def _target(slot: str, tensor: torch.Tensor, classes: int | None) -> list[Finding]:
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    ignored = rows == _IGNORED
    found: list[Finding] = []
    if bool(ignored.all()):
        found.append({"tensor": slot, "finding": f"is ignored everywhere ({_IGNORED})", "count": tensor.numel()})
    elif rows.shape[1] > 1:
        found += _finding(slot, f"is ignored everywhere ({_IGNORED})", ignored.all(1), int(ignored.all(1).sum()))
    outside = ~ignored & ((rows < 0) if classes is None else (rows < 0) | (rows >= classes))
    said = "is negative" if classes is None else f"lies outside of {classes} classes"
    return found + _finding(slot, said, outside.any(1), int(outside.sum()))


def _lengths(named: Sequence[tuple[str, torch.Tensor]]) -> list[Finding]:
    """Targets that are longer than the input that they are to be aligned with, as CTC needs it."""
    of: dict[str, tuple[str, torch.Tensor]] = {}
    for slot, tensor in named:
        if "length" in slot.lower() and tensor.dim() == 1 and not tensor.is_floating_point():
            of.setdefault(
                "target" if any(part in slot.lower() for part in ("target", "label")) else "input", (slot, tensor)
            )
    if len(of) < 2 or of["target"][1].shape != of["input"][1].shape:
        return []
    (slot, targets), (other, inputs) = of["target"], of["input"]
    longer = targets > inputs.to(targets.device)
    return _finding(slot, f"is longer than {other}", longer, int(longer.sum()))


def _finding(slot: str, said: str, which: torch.Tensor, count: int) -> list[Finding]:
    """One finding, if any sample is concerned."""
    samples = which.nonzero().flatten().tolist()
    return [{"tensor": slot, "finding": said, "samples": samples[:_SAMPLES], "count": count}] if samples else []
