"""A kernel that looks compiled and is interpreted: launches take the way of a GPU's, and their rows can be read."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from nantrace.stats.fused import batch_kernel, row_kernel

HANDLE = 77  # of a function on the device


class Target(NamedTuple):
    backend: str = "cuda"


class Metadata(NamedTuple):
    target: Target = Target()


class Source(NamedTuple):
    signature: dict[str, str]


class Driver:
    """Triton's active driver, of a machine with one CPU."""

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 1000 + device


class Drivers:
    """Triton's choice of one."""

    def __init__(self) -> None:
        self.active = Driver()


class Compiled:
    """What Triton returns from a launch: its launcher runs the kernel by addresses, as a driver does."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]) -> None:
        self.function, self.packed_metadata, self.metadata = HANDLE, (8, 1, 0), Metadata()
        self.interpreted, self.options = kernel, options
        self.dtypes = [each.dtype for each in arguments if isinstance(each, torch.Tensor)]
        names = kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]
        self.src = Source(
            {
                name: "*i" if isinstance(each, torch.Tensor) else "constexpr" if name.isupper() else "i64"
                for name, each in zip(names, arguments, strict=True)
            }
        )
        self._run: Any = self._launched

    @property
    def run(self) -> Any:
        return self._run

    def _launched(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, known: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        assert (z, stream, function, metadata) == (1, 999, HANDLE, (8, 1, 0))
        pointers = [
            each if isinstance(each, torch.Tensor) else at(each, dtype)
            for each, dtype in zip(arguments, self.dtypes, strict=False)
        ]
        self.interpreted[(x, y)](*pointers, *arguments[len(pointers) :], **self.options)


class Interpreted:
    """In place of a Triton kernel: one compiled kernel for each set of dtypes, constants and aligned pointers."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled, self.launches = kernel, {}, 0
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*arguments: Any, **options: int) -> Compiled:
            self.launches += 1
            key = tuple(_kind(each) for each in arguments if isinstance(each, torch.Tensor))
            key += tuple(arguments[11 if len(key) == 2 else 4 :])
            if key not in self.compiled:
                self.compiled[key] = Compiled(self.kernel, arguments, options)
            compiled = self.compiled[key]
            compiled.run(*grid, 1, 999, HANDLE, compiled.packed_metadata, None, None, None, *arguments)
            return compiled

        return launch


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
    return tensor.dtype, tensor.data_ptr() % 16 == 0


def at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Some elements at an address: the interpreter takes no more of them than the address."""
    return torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=dtype)


def kernels() -> tuple[Interpreted, Interpreted]:
    return Interpreted(row_kernel), Interpreted(batch_kernel)
