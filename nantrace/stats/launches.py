"""Launches of a Triton kernel without Triton's share of Python, once Triton was seen doing the same.

Knows how `kernel[grid](...)` ends: in a call of the compiled kernel's launcher with the grid, the stream and all
arguments. What comes before it (binding, specializing, hashing) finds the compiled kernel and takes longer than the
call. Of each kind of launch the first goes through Triton and the second too, watched: if the launcher is called with
exactly what was expected, the third and all later ones call it with the same. In any other case everything goes
through Triton: an interpreted kernel, a Triton of another make, hooks of a profiler, a launcher that failed.

Doesn't know what kernels compute, nor what makes two launches of one kind: whoever launches says so by a key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

try:
    from triton import knobs
except ImportError:  # an older Triton: every launch goes through it
    knobs = None

ALIGNED = 16  # bytes: Triton compiles anew for pointers that this divides


class _Launcher(NamedTuple):
    """What launches a compiled kernel."""

    driver: Any  # that was active: another one has compiled nothing
    run: Callable[..., object]
    function: int  # on the device, which the key names
    metadata: Any


class Launches:
    """The launches of one kernel, whose integer arguments are all annotated as `tl.int64`. Any thread may launch.

    A key stands for all that Triton compiles a kernel anew for: the dtypes and constants of the arguments, the device,
    and which pointers are divisible by `ALIGNED`.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[Hashable, Any] = {}  # what Triton returned of the last launch
        self._launchers: dict[Hashable, _Launcher] = {}
        self._refused: set[Hashable] = set()
        self._lock = threading.RLock()

    def again(self, key: Hashable, grid: tuple[int, int], device: int, arguments: Sequence[int | bool]) -> bool:
        """Launches on the current stream of `device`, the current device; false if that takes Triton.

        Args:
            key: of this launch.
            grid: programs in both dimensions.
            device: its index.
            arguments: all of the kernel's, constants too, with addresses for tensors.
        """
        launcher = self._launchers.get(key)
        if launcher is None or self._watched():
            return False
        try:
            active = driver.active
            if active is not launcher.driver:
                return False
            stream = active.get_current_stream(device)
            launcher.run(*grid, 1, stream, launcher.function, launcher.metadata, None, None, None, *arguments)
        except Exception:  # Triton may still know how, or say better why not
            self._refuse(key)
            return False
        return True

    def through_triton(self, key: Hashable, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        """Launches on the current device and stream; what `again` needs of Triton is learned on the way.

        Args:
            key: of this launch.
            grid: programs in both dimensions.
            arguments: all of the kernel's, constants too, with tensors of the types that the kernel reads.
        """
        with self._lock:
            compiled = self._compiled.get(key)
            if self._watched() or key in self._refused:
                self._launch(grid, arguments)
            elif compiled is None:
                self._compiled[key] = self._launch(grid, arguments)
            else:
                self._watch(key, grid, arguments, compiled)

    def _watch(self, key: Hashable, grid: tuple[int, int], arguments: Sequence[Any], compiled: Any) -> None:
        calls: list[tuple[Any, ...]] = []
        try:
            launcher = _spy(compiled, calls)
        except Exception:  # of another make
            launcher = None
        if launcher is None:
            self._refuse(key)
            self._launch(grid, arguments)
            return
        try:
            launched = self._launch(grid, arguments)
        finally:
            compiled._run = launcher
        if launched is compiled:
            self._learn(key, grid, arguments, compiled, calls)
        else:  # compiled anew, for a reason of Triton's
            self._compiled[key] = launched

    def _launch(self, grid: tuple[int, int], arguments: Sequence[Any]) -> Any:
        return self._kernel[grid](*arguments, **self._options)

    def _learn(
        self, key: Hashable, grid: tuple[int, int], arguments: Sequence[Any], compiled: Any, calls: list[Any]
    ) -> None:
        try:
            active = driver.active
            stream = active.get_current_stream(active.get_current_device())
            expected = (*grid, 1, stream, compiled.function, compiled.packed_metadata)
            types = list(compiled.src.signature.values())
            understood = (
                len(calls) == 1
                and calls[0][: len(expected)] == expected
                and _same(calls[0][len(expected) + 3 :], arguments)  # 3: metadata and hooks, which are not there
                and len(types) == len(arguments)
                and all(type_ == "constexpr" or type_ == "i64" or type_.startswith("*") for type_ in types)
                and compiled.metadata.target.backend == "cuda"  # others may specialize on more than alignment
            )
            if understood:
                self._launchers[key] = _Launcher(active, compiled._run, compiled.function, compiled.packed_metadata)
        except Exception:
            understood = False
        if not understood:
            self._refuse(key)

    def _refuse(self, key: Hashable) -> None:
        self._refused.add(key)
        self._launchers.pop(key, None)

    def _watched(self) -> bool:
        """Whether something hooks into launches, or has Triton compile another kernel than it did."""
        try:
            runtime = knobs.runtime
            return bool(
                _calls(runtime.launch_enter_hook)
                or _calls(runtime.launch_exit_hook)
                or self._kernel.pre_run_hooks
                or runtime.debug
                or knobs.compilation.instrumentation_mode
                or runtime.add_stages_inspection_hook is not None
            )
        except AttributeError:  # of another make: there may be hooks that nobody knows here
            return True


def _calls(hook: Any) -> Any:
    """True if calling the hook does something: a chain of none is no hook."""
    return hook is not None and getattr(hook, "calls", True)


def _spy(compiled: Any, calls: list[tuple[Any, ...]]) -> Any:
    """Has the launcher of a compiled kernel leave its arguments in `calls`; the launcher, None if there is none."""
    launcher = compiled._run

    def spy(*arguments: Any) -> Any:
        calls.append(arguments)
        return launcher(*arguments)

    if launcher is None or compiled.run is not launcher:
        return None
    compiled._run = spy
    if compiled.run is not spy:
        compiled._run = launcher
        return None
    return launcher


def _same(seen: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(seen) == len(expected) and all(
        a is b if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b
        for a, b in zip(seen, expected, strict=True)
    )
