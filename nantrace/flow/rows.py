"""Which tensors have the samples of the batch along dimension 0: the batch's, and what was computed of them row by row.

A size proves nothing: a weight has as many rows as a batch has samples by chance. What is followed is memory, by how
far apart two samples lie in it, so that a transposed view is told from the tensor it is a view of. In doubt a tensor is
taken for none of these: an op that mixes or moves rows, or of which this is not known, ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from nantrace.flow.ops import OpFacts

#: Of these ops the rows of the result are those of this argument alone.
_ROWS_OF = {
    "aten.mm": 0,
    "aten.bmm": 0,
    "aten.mv": 0,
    "aten.linear": 0,
    "aten.addmm": 1,
    "aten.baddbmm": 1,
    "aten.addmv": 1,
}
#: Ops that put rows elsewhere without naming dimension 0, or whose result has other rows.
_MOVE = frozenset(
    f"aten.{name}"
    for name in ("index", "index_put", "index_put_", "flip", "roll", "rot90", "take", "embedding_dense_backward")
)
_CONCATENATE = ("aten.cat", "aten.stack")


class BatchRows:
    """Follows the samples of a batch through the ops of a step.

    Attributes:
        size: how many samples the batch has; None if nobody knows.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._apart: dict[int, int] = {}  # storage -> elements from one sample to the next

    def begin(self, tensors: Sequence[Tensor], size: int | None = None) -> None:
        """A batch of `size` samples comes, by default the size of dimension 0 that most of its tensors share.

        Those of its tensors that have as many rows hold a sample in each.
        """
        sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.dim())
        size = size or (sizes.most_common(1)[0][0] if sizes else None)
        if size != self.size:
            self._apart.clear()
            self.size = size
        for tensor in tensors:
            if size and type(tensor) is Tensor and tensor.dim() and tensor.shape[0] == size:
                try:
                    self._apart[tensor.untyped_storage()._cdata] = tensor.stride(0)
                except RuntimeError:  # sparse: no memory of its own
                    continue

    def are_rows_of(self, plane: Tensor) -> bool:
        """Whether dimension 0 of a tensor is the batch."""
        if not self.size or not plane.dim() or plane.shape[0] != self.size:
            return False
        return self._apart.get(plane.untyped_storage()._cdata) == plane.stride(0)

    def follow(self, facts: OpFacts, args: Sequence[Any], out: Any) -> None:
        """An op put something out; its arguments are those that it was called with."""
        try:
            if type(out) is Tensor:
                self._note(facts, args, out, self._source(facts, args), True)
            elif isinstance(out, (list, tuple)) and not facts.listwise:
                source = self._source(facts, args)
                for index, each in enumerate(out):
                    if type(each) is Tensor:
                        self._note(facts, args, each, source, index == 0)
        except RuntimeError:  # a tensor without memory, whose rows nobody can follow
            return

    def _note(self, facts: OpFacts, args: Sequence[Any], out: Tensor, source: Tensor | None, first: bool) -> None:
        """Of several results the first has the rows of its source; the others may be statistics, or a weight's."""
        key = out.untyped_storage()._cdata
        alike = source is not None and out.dim() and out.shape[0] == source.shape[0]
        if alike and (first or out.shape == source.shape):  # type: ignore[union-attr]
            self._apart[key] = out.shape[0] * out.stride(0) // self.size  # type: ignore[operator]
        elif not (facts.writes_self and args and out is args[0]):  # which may be a part of what it was
            self._apart.pop(key, None)

    def _source(self, facts: OpFacts, args: Sequence[Any]) -> Tensor | None:
        """The argument whose rows, of a sample or a part of one each, the result has; None if there is none."""
        apart, size = self._apart, self.size
        if not apart or not size or facts.op in _MOVE:
            return None
        only = _ROWS_OF.get(facts.op)
        for position, value in enumerate(_concatenated(args) if facts.op in _CONCATENATE else args):
            if type(value) is not Tensor or (only is not None and position != only):
                continue
            stride = apart.get(value.untyped_storage()._cdata)
            if stride is None or not value.dim() or not value.shape[0] or value.shape[0] % size:
                continue
            if value.shape[0] * value.stride(0) == stride * size and not _along_rows(facts, args, value.dim()):
                return value
        return None


def _concatenated(args: Sequence[Any]) -> Iterator[Any]:
    """The tensors that are put beside each other; none if they are put below each other."""
    if len(args) > 1 and args[1] != 0:
        yield from args[0]


def _along_rows(facts: OpFacts, args: Sequence[Any], dims: int) -> bool:
    """Whether an op goes along dimension 0 of an argument with so many dimensions."""
    position = facts.position.get("dim")
    if position is None or position >= len(args):
        return False
    along = args[position]
    return any(dim in (0, -dims) for dim in (along if isinstance(along, (list, tuple)) else (along,)))
