"""Which samples of a batch make a step fail: delta debugging over dimension 0 of its tensors.

Not bit-exact: kernels treat batches of other sizes otherwise, and a loss averaged over fewer samples is another loss.
What is left fails by itself, and no half or complement that was tried did with less; the algorithm is ddmin (Zeller and
Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.errors import ReplayError
from nantrace.flow.values import tensors_in
from nantrace.replay.replays import Replays
from nantrace.replay.step import Step

#: Samples tried by themselves once one was found that fails so: does any other?
_OTHERS = 7


@dataclass(frozen=True)
class Samples:
    """What is left of a batch.

    Attributes:
        indices: samples that fail together, in order.
        size: samples of the whole batch.
        replays: runs of the step that were needed.
        minimal: False when the replays ran out before no sample could be left out.
        alone: where one sample is left, which fail by themselves, of those that were tried.
        tried: how many samples were tried by themselves.
    """

    indices: tuple[int, ...]
    size: int
    replays: int
    minimal: bool
    alone: tuple[int, ...] = ()
    tried: int = 0

    def __str__(self) -> str:
        count, rough = len(self.indices), "Not bit-exact: a smaller batch takes other kernels."
        if count == 1 and 1 < self.tried == len(self.alone):
            which = f"{self.size:,} samples" if self.tried == self.size else f"{self.tried:,} samples that were tried"
            return f"Each of the {which} fails by itself: the reason is in no one of them alone. {rough}"
        if count == 1:
            return f"Of {self.size:,} samples, 1 fails by itself (sample {self.indices[0]}). {rough}"
        shown = ", ".join(map(str, self.indices[:12])) + (", ..." if count > 12 else "")
        end = "none of them can be left out" if self.minimal else "the replays ran out before fewer were tried"
        if count == self.size:
            return f"All {count:,} samples fail together, every sample of the batch; {end}. {rough}"
        return f"Of {self.size:,} samples, {count:,} fail together (samples {shown}); {end}. {rough}"


def smallest_failing_batch(
    step: Step, *, max_replays: int = 60, progress: Callable[[str], None] | None = None
) -> Samples:
    """Find few samples with which the step still fails in the way in which it fails with all of them.

    Args:
        step: a step with a batch that is handed to its function; its tensors that share the commonest size of
            dimension 0 are sliced, everything else stays.
        max_replays: how often the step may run.
        progress: told one line about each replay.

    Raises:
        ReplayError: the step has no batch to slice, or does not fail, or its state cannot be kept.
    """
    size = batch_size(step.batch)
    with Replays(step, max_replays, progress) as replays:
        return _searched(replays, step, size)


def _searched(replays: Replays, step: Step, size: int) -> Samples:
    whole = replays.plain(f"all {size:,} samples")
    if not whole.failed:
        raise ReplayError(f"The step does not fail with its {size:,} samples: there is nothing to leave out.")
    kinds = {end.place for end in whole.nonfinite}

    def fails(indices: Sequence[int]) -> bool:
        replays.step = dataclasses.replace(step, batch=sliced(step.batch, size, indices))
        ends = replays.plain(f"{len(indices):,} samples")
        return bool(kinds & {end.place for end in ends.nonfinite}) if kinds else ends.raised == whole.raised

    indices, minimal = reduced(list(range(size)), fails, lambda: replays.left > 0)
    alone, tried = _alone(indices[0], size, fails, lambda: replays.left > 0) if len(indices) == 1 else ((), 0)
    return Samples(tuple(indices), size, replays.count, minimal, alone, tried)


def _alone(
    index: int, size: int, fails: Callable[[Sequence[int]], bool], may: Callable[[], bool]
) -> tuple[tuple[int, ...], int]:
    """Which samples besides `index` fail by themselves, and how many were tried, up to the first that does not."""
    others = [i for i in range(size) if i != index]
    step = max(1, -(-len(others) // _OTHERS))
    alone = [index]
    for other in others[::step]:
        if not may():
            break
        if not fails([other]):
            return tuple(sorted(alone)), len(alone) + 1
        alone.append(other)
    return tuple(sorted(alone)), len(alone)


def reduced(
    indices: list[int], fails: Callable[[Sequence[int]], bool], may: Callable[[], bool]
) -> tuple[list[int], bool]:
    """ddmin: the failing rest, and whether it is minimal."""
    parts = 2
    while len(indices) > 1:
        chunks = [indices[len(indices) * i // parts : len(indices) * (i + 1) // parts] for i in range(parts)]
        rests = [[i for i in indices if i not in set(chunk)] for chunk in chunks] if parts > 2 else []
        for tried, then in [*((chunk, 2) for chunk in chunks), *((rest, max(parts - 1, 2)) for rest in rests)]:
            if not may():
                return indices, False
            if fails(tried):
                indices, parts = tried, then
                break
        else:
            if parts >= len(indices):
                return indices, True
            parts = min(len(indices), 2 * parts)
    return indices, True


def batch_size(batch: Any) -> int:
    """The commonest size of dimension 0 among a batch's tensors.

    Raises:
        ReplayError: no tensor has a dimension 0 of two or more samples.
    """
    sizes = Counter(t.shape[0] for _, t in tensors_in(batch, "batch") if t.dim() and t.shape[0] > 1)
    if not sizes:
        raise ReplayError(
            "The step has no batch with two or more samples along dimension 0; hand the batch to nantrace.Step."
        )
    return sizes.most_common(1)[0][0]


def sliced(batch: Any, size: int, indices: Sequence[int]) -> Any:
    """A batch of the chosen samples; the given one is not changed.

    Raises:
        ReplayError: a tensor with samples lies in an object that cannot be rebuilt.
    """
    if isinstance(batch, torch.Tensor):
        if not batch.dim() or batch.shape[0] != size:
            return batch
        chosen = torch.tensor(list(indices), device=batch.device)
        return batch.detach().index_select(0, chosen).requires_grad_(batch.requires_grad)
    if isinstance(batch, dict):
        items = {key: sliced(item, size, indices) for key, item in batch.items()}
        return items if type(batch) is dict else type(batch)(items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(sliced(item, size, indices) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(sliced(item, size, indices) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: sliced(getattr(batch, f.name), size, indices) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    if any(t.dim() and t.shape[0] == size for _, t in tensors_in(batch, "batch")):
        raise ReplayError(
            f"The batch holds samples in a {type(batch).__name__}, which cannot be sliced; use dicts, tuples or "
            f"dataclasses."
        )
    return batch
