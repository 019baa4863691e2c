"""What a check of checkpoint files found, as plain values. Knows no torch, no file format and no terminal."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from nantrace.events import TensorStats

Role = Literal["model", "optimizer", "scheduler", "scaler"]
Status = Literal["passes", "fails", "undecided", "unreadable"]


@dataclass(frozen=True)
class CheckedTensor:
    """One stored tensor.

    Attributes:
        name: dotted path in the file: "optimizer.state.0.exp_avg".
        role: the part of the training state that it belongs to.
        stats: counts and range in the stored dtype.
        aliases: other names in the file for the same memory, which was read once.
        parameter: of optimizer state, the parameter that it belongs to, where the file leaves no doubt.
        index: of the first nonfinite element, one integer a dimension; None if there is none.
        float16_overflow: finite elements that become infinite in float16 (magnitude 65,520 and above, by rounding).
        float16_zero: nonzero elements that become zero in float16 (magnitude 2**-25 and below).
        huge: from this magnitude on, elements of the dtype count as huge, and one does; None if none does.
        expected: why its nonfinite values are harmless, if they are.
    """

    name: str
    role: Role
    stats: TensorStats
    aliases: tuple[str, ...] = ()
    parameter: str | None = None
    index: tuple[int, ...] | None = None
    float16_overflow: int = 0
    float16_zero: int = 0
    huge: float | None = None
    expected: str | None = None

    @property
    def bad(self) -> bool:
        return self.stats.nonfinite > 0 and self.expected is None


@dataclass(frozen=True)
class CheckedNumber:
    """A Python number that is nonfinite, such as a learning rate.

    Attributes:
        bad: whether training reads it as state; a `best_loss` of infinity, for instance, is only told.
    """

    name: str
    role: Role
    value: float
    bad: bool


@dataclass(frozen=True)
class SkippedObject:
    """An object beyond tensors and plain values: it was not rebuilt. Tensors stored inside it were checked."""

    name: str
    kind: str


@dataclass(frozen=True)
class CheckedFile:
    """One checkpoint.

    Attributes:
        path: as given.
        format: "torch", "torch (legacy)", "safetensors" or "torch distributed"; None if it could not be told.
        bytes: size on disk.
        modified: time of the last change, in seconds since 1970; of a folder that of its metadata.
        tensors: all of them, in the order of the file.
        numbers: nonfinite Python numbers.
        counted: how many Python floats were looked at.
        objects: what was not rebuilt.
        notes: sentences on what was not, or not fully, looked at.
        error: why the file could not be read, in one sentence.
    """

    path: str
    format: str | None = None
    bytes: int = 0
    modified: float = 0.0
    tensors: tuple[CheckedTensor, ...] = ()
    numbers: tuple[CheckedNumber, ...] = ()
    counted: int = 0
    objects: tuple[SkippedObject, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def bad(self) -> tuple[CheckedTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.bad)

    @property
    def unread(self) -> tuple[CheckedTensor, ...]:
        """Tensors without values that could be read."""
        return tuple(tensor for tensor in self.tensors if not tensor.stats.observed)

    @property
    def status(self) -> Status:
        """Undecided: nothing nonfinite was found, but some tensor could not be read, or there was nothing to read."""
        if self.error is not None:
            return "unreadable"
        if self.bad or any(number.bad for number in self.numbers):
            return "fails"
        return "undecided" if self.unread or not (self.tensors or self.counted) else "passes"

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types: counts, and those tensors of which there is something to tell."""
        from nantrace.diagnosis.verdict import plain

        told = [t for t in self.tensors if t.stats.nonfinite or t.float16_overflow or t.huge or not t.stats.observed]
        found = {
            "path": self.path,
            "status": self.status,
            "format": self.format,
            "bytes": self.bytes,
            "modified": self.modified,
            "tensors": {**Counter(tensor.role for tensor in self.tensors)},
            "nonfinite_tensors": [tensor.name for tensor in self.bad],
            "float16_zero": sum(tensor.float16_zero for tensor in self.tensors),
            "told": told,
            "numbers": self.numbers,
            "objects": self.objects,
            "notes": self.notes,
            "error": self.error,
        }
        strict = plain(found)
        assert isinstance(strict, dict)
        return strict


@dataclass(frozen=True)
class CheckedFiles:
    """Several checkpoints, in the order given. `str()` is what `nantrace checkpoint` prints."""

    files: tuple[CheckedFile, ...]

    @property
    def newest(self) -> CheckedFile | None:
        """The file that passes and was changed last; of equal ones the one given last. None if none passes."""
        passing = [(file.modified, place, file) for place, file in enumerate(self.files) if file.status == "passes"]
        return max(passing)[2] if passing else None

    def __str__(self) -> str:
        """What `nantrace checkpoint` prints: each file with what is nonfinite in it, and the newest that passes."""
        # Named, not imported: a value loads rendering only when it is shown.
        shown: str = importlib.import_module("nantrace.render.checkpoint").text(self)
        return shown

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        newest = self.newest
        return {
            "files": [file.to_dict() for file in self.files],
            "newest_that_passes": None if newest is None else newest.path,
        }
