"""Loading a pickle with torch's `weights_only` unpickler when the file names classes that it refuses.

Every name that the unpickler refuses is bound to an inert class of this module, so nothing that a file names is ever
imported or called. Knows no checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import pickle
import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from nantrace.checkpoint.entries import CheckpointError

#: Modules, and builtins, that a checkpoint has no honest use for: a file that names one is refused as a whole.
_RUNNING = (
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "commands",
    "pty",
    "runpy",
    "importlib",
    "shutil",
    "socket",
    "ctypes",
    "code",
)
_RUNNING_BUILTINS = ("eval", "exec", "compile", "__import__", "open", "breakpoint", "input", "execfile")
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


class StandIn:
    """An object that was not rebuilt: keeps what it would have been made of, and does nothing."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.parts: list[Any] = list(arguments)

    def __new__(cls, *arguments: Any, **named: Any) -> StandIn:
        made = super().__new__(cls)
        made.parts = [*arguments, *named.values()]
        return made

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts.extend(values)


def stand_in(kind: str) -> type[StandIn]:
    """An inert class for one name."""
    return type("StandIn", (StandIn,), {"kind": kind})


def asks_to_run(module: str, name: str) -> bool:
    """Whether a pickle that names this means to run something."""
    if module in ("builtins", "__builtin__"):
        return name.split(".")[0] in _RUNNING_BUILTINS
    return module.split(".")[0] in _RUNNING


def refusal(module: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"asks to call {module}.{name}, which no checkpoint needs: it was not read further; don't load it with "
        "weights_only=False"
    )


def load_inert(load: Callable[[], Any], pickles: Callable[[], Iterator[IO[bytes]]]) -> Any:
    """What `load` gives, with objects beyond tensors as `StandIn`.

    Args:
        load: calls `torch.load(..., weights_only=True)`.
        pickles: gives the file's pickles, to look up the names in them; asked only where `load` refuses the file.

    Raises:
        CheckpointError: the file asks to run something, or is refused all the same.
    """
    try:
        return load()
    except pickle.UnpicklingError as error:
        names = [pair for stream in pickles() for pair in named_globals(stream)]
        for module, name in names:
            if asks_to_run(module, name):
                raise refusal(module, name) from None
        if not names or "Unsupported operand" in str(error):
            raise CheckpointError(f"is no checkpoint of torch.save, or a damaged one ({_short(error)})") from None
    _import_subclasses(names)
    try:
        with torch.serialization.safe_globals(_bound(names)):
            return load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"cannot be read without running what it names ({_short(error)}): save state_dict()s with torch.save"
        ) from None


def _import_subclasses(names: list[tuple[str, str]]) -> None:
    """PyTorch's own tensor subclasses register what their pickles need when they are imported."""
    for home in ("torch.distributed.tensor", "torch.nested"):
        if any(f"{module}.".startswith(f"{home}.") for module, _ in names):
            with contextlib.suppress(ImportError):  # a build without torch.distributed
                importlib.import_module(home)


def _bound(names: list[tuple[str, str]]) -> list[Any]:
    registered = {_name_of(each) for each in torch.serialization.get_safe_globals()}
    spelled = [f"{module}.{name}" for module, name in names]
    bound: dict[str, Any] = {name: stand_in(name) for name in spelled if name not in registered}
    # The unpickler fills these by item, which it does only for the plain types.
    bound |= {name: made for name, made in _PLAIN.items() if name in bound}
    return [(made, name) for name, made in bound.items()]


def _name_of(registered: Any) -> str:
    if isinstance(registered, tuple):
        return str(registered[1])
    return f"{registered.__module__}.{registered.__qualname__}"


def _as_dict(*_: Any) -> Any:
    return collections.OrderedDict()


def _as_list(*_: Any) -> Any:
    return []


_PLAIN = {"collections.defaultdict": _as_dict, "collections.deque": _as_list}


def named_globals(stream: IO[bytes]) -> list[tuple[str, str]]:
    """(module, name) of whatever one pickle would import, by today's names; reads opcodes and runs none.

    Raises:
        CheckpointError: it is no pickle, or cut short.
    """
    found: dict[tuple[str, str], None] = {}
    strings: list[str] = []  # the last two are the operands of STACK_GLOBAL, if nothing clever is going on
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                found[_today(module, name)] = None
            elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                found[_today(strings[-2], strings[-1])] = None
            elif opcode.name in _STRINGS:
                strings = [*strings[-1:], str(argument)]
    except Exception:  # whatever the bytes make of it
        raise CheckpointError("is no checkpoint, or one that was cut short: save or copy it again") from None
    return list(found)


def _today(module: str, name: str) -> tuple[str, str]:
    """Protocol 2 writes the names of Python 2."""
    if (module, name) in NAME_MAPPING:
        renamed: tuple[str, str] = NAME_MAPPING[(module, name)]
        return renamed
    return IMPORT_MAPPING.get(module, module), name


def _short(error: BaseException) -> str:
    """What torch's message says beyond how to load the file by running it, on one line."""
    if "Unsupported operand" in str(error):
        return "its pickle is of another protocol than the 2 that weights_only reads"
    parts = [part.strip() for line in str(error).splitlines() for part in line.split("WeightsUnpickler error:")]
    said = [part for part in parts if part.startswith(("Trying", "Can only", "Unsupported", "persistent", "Only"))]
    return (said[0] if said else type(error).__name__)[:160].rstrip(".")
