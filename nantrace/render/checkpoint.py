"""What a check of checkpoints found, as text for a terminal: at most `width` columns, whatever the names hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nantrace.render.cells import harmless, shorten, wrap
from nantrace.render.wording import plural

if TYPE_CHECKING:
    from nantrace.checkpoint.result import CheckedFile, CheckedFiles, CheckedTensor

_LONGEST = 20  # lines of one kind in one file; the rest is counted
_FLOAT16 = "Finite, but infinite in float16 (beyond 65504)"
_HEADS = {"passes": "PASSES", "fails": "FAILS", "undecided": "UNDECIDED", "unreadable": "UNREADABLE"}


def text(found: CheckedFiles, *, width: int = 80, ascii: bool = False) -> str:
    """The lines that `nantrace checkpoint` prints, joined by newlines.

    Args:
        found: what `check_checkpoint` gave.
        width: columns of the terminal.
        ascii: no character beyond ASCII.
    """
    lines: list[str] = []
    for file in found.files:
        for indent, words in _paragraphs(file):
            clean = harmless(words, ascii)
            room = max(width, 40) - indent - 4
            clean = " ".join(shorten(word, room, ascii) for word in clean.split(" ")) if indent else clean
            lines += wrap(clean, max(width, 40), indent + 4, " " * indent)
        lines.append("")
    return "\n".join([*lines, *wrap(harmless(_newest(found), ascii), max(width, 40), 4, "")])


def _newest(found: CheckedFiles) -> str:
    newest = found.newest
    if newest is None:
        return "No file passes."
    return f"Newest that passes: {newest.path}"


def _paragraphs(file: CheckedFile) -> Iterator[tuple[int, str]]:
    yield 0, f"{_HEADS[file.status]}   {file.path}{_facts(file)}"
    if file.error is not None:
        yield 4, file.error
        return
    yield 4, _summary(file)
    yield from _listed("Nonfinite:", [_nonfinite(t) for t in file.bad])
    bad = [f"{n.name}   {n.value}   {n.role}" for n in file.numbers if n.bad]
    yield from _listed("Nonfinite numbers of the training state:", bad)
    yield from _listed(f"{_FLOAT16}:", [_overflow(t) for t in file.tensors if t.float16_overflow])
    yield from _listed("Huge values:", [_huge(t) for t in file.tensors if t.huge is not None])
    yield from _listed("Not read:", [f"{t.name}: {t.stats.why}" for t in file.unread])
    yield from _asides(file)


def _facts(file: CheckedFile) -> str:
    if file.format is None:
        return ""
    return f"   {file.format}, {_size(file.bytes)}, {plural(len(file.tensors), 'tensor')}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return plural(count, "byte")


def _summary(file: CheckedFile) -> str:
    if not file.tensors and not file.counted:
        return "It holds no tensors and no numbers: there is nothing to check."
    roles = Counter(tensor.role for tensor in file.tensors)
    bad = Counter(tensor.role for tensor in file.bad)
    parts = [f"{role} {bad[role]} of {count:,}" for role, count in roles.items()]
    return f"Tensors with nonfinite values: {', '.join(parts)}." if parts else "No tensors; numbers were checked."


def _listed(head: str, rows: Sequence[str]) -> Iterator[tuple[int, str]]:
    if rows:
        yield 4, head
    for row in rows[:_LONGEST]:
        yield 8, row
    if len(rows) > _LONGEST:
        yield 8, f"and {len(rows) - _LONGEST:,} more (--json lists them all)"


def _named(tensor: CheckedTensor) -> str:
    of = f" (of {tensor.parameter})" if tensor.parameter else ""
    also = f", also {', '.join(tensor.aliases[:3])}" if tensor.aliases else ""
    more = f" and {len(tensor.aliases) - 3} more" if len(tensor.aliases) > 3 else ""
    return f"{tensor.name}{of}{also}{more}   {tensor.stats.dtype} {list(tensor.stats.shape)}"


def _nonfinite(tensor: CheckedTensor) -> str:
    stats = tensor.stats
    counts = [(stats.nan, "nan"), (stats.posinf, "inf"), (stats.neginf, "-inf")]
    held = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    first = f", first at {list(tensor.index)}" if tensor.index else ""
    return f"{_named(tensor)}   {held} of {stats.numel:,}{first}"


def _overflow(tensor: CheckedTensor) -> str:
    return f"{_named(tensor)}   {tensor.float16_overflow:,} of {tensor.stats.numel:,}, up to {tensor.stats.absmax:.4g}"


def _huge(tensor: CheckedTensor) -> str:
    return f"{_named(tensor)}   up to {tensor.stats.absmax:.4g} (huge from {tensor.huge:,.0f} on)"


def _asides(file: CheckedFile) -> Iterator[tuple[int, str]]:
    zeros = Counter[str]()
    for tensor in file.tensors:
        zeros[tensor.role] += tensor.float16_zero
    lost = [f"{role} {count:,}" for role, count in zeros.items() if count]
    if lost:
        yield 4, f"Nonzero values that float16 would make zero: {', '.join(lost)}."
    harmless_ones = [f"{tensor.name}: {tensor.expected}" for tensor in file.tensors if tensor.expected]
    yield from _listed("Infinite on purpose:", harmless_ones)
    yield from _listed(
        "Nonfinite numbers that no update computes with:", [f"{n.name}   {n.value}" for n in file.numbers if not n.bad]
    )
    skipped = [f"{thing.name}   {thing.kind}" for thing in file.objects]
    yield from _listed("Objects beyond tensors, not rebuilt (tensors inside them were checked):", skipped)
    if any(thing.kind.startswith("numpy.") for thing in file.objects):
        yield 4, "Numbers in NumPy arrays and scalars were not checked: store them as tensors to have them checked."
    for note in file.notes[:_LONGEST]:
        yield 4, note
