"""The user's own code as a command runs it: what it raised, told with its own frames only.

Code of the user's may raise, leave with `sys.exit`, or be interrupted, while its file is loaded or while its step runs.
Frames of nantrace, of the command line and of Python's import machinery say nothing to the user and are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from nantrace.cli.console import fail, note
from nantrace.errors import NantraceError

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # of the whole package
_OURS = (_HERE, "<frozen importlib", "<frozen runpy>")


class Watched:
    """Remembers, in words, the first exception that came out of a function. Holds no frame, so no tensor either.

    Attributes:
        told: its traceback; None as long as nothing was raised.
        short: the last line of that, and where it happened.
        left: how `sys.exit` was called, if it was: "sys.exit(7) at train.py:12 in step".
    """

    def __init__(self) -> None:
        self.told: str | None = None
        self.short = ""
        self.left: str | None = None

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, watched; whatever it raises goes on unchanged."""
        from nantrace.replay.anomaly import is_on

        asked = is_on()  # by the user: what it stops is the step's own failure

        @functools.wraps(run)
        def run_watched(*args: Any) -> Any:
            stopped = is_on() and not asked  # whoever replays it may let anomaly mode stop it
            try:
                return run(*args)
            except BaseException as error:
                if not stopped or isinstance(error, SystemExit):
                    self.saw(error)
                raise

        return run_watched

    def saw(self, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            self.left = self.left or left_with(error)
        elif self.told is None and isinstance(error, Exception):
            self.told, self.short = own_traceback(error), f"{_named(error)}{_place(error)}"


@contextlib.contextmanager
def loading(path: str) -> Iterator[None]:
    """While a file of the user's is loaded: its own exception is shown as Python would, and ends the command."""
    try:
        yield
    except NantraceError:
        raise
    except SystemExit as error:
        fail(f"{path} called {left_with(error)} while it was loaded; what it reads from sys.argv goes after --.")
    except Exception as error:
        note(own_traceback(error))
        fail(f"{path} raised {_named(error)}{_place(error)} while it was loaded; no step was run.")


def own_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames that are not the user's business."""
    whole = traceback.TracebackException.from_exception(error)
    _strip(whole, set())
    return "".join(whole.format()).rstrip("\n")


def _strip(told: traceback.TracebackException | None, done: set[int]) -> None:
    if told is None or id(told) in done:
        return
    done.add(id(told))
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if not _is_ours(frame.filename)])
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        _strip(other, done)


def left_with(error: SystemExit) -> str:
    """How the interpreter was to be left: "sys.exit(7) at train.py:12 in step"."""
    code = "" if error.code is None else repr(error.code)
    return f"sys.exit({code if len(code) <= 60 else code[:57] + '...'}){_place(error)}"


def _named(error: BaseException) -> str:
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(error: BaseException) -> str:
    """The innermost line outside libraries."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    own = [f for f in frames if "site-packages" not in f.filename and not _is_standard(f.filename)] or frames
    return f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _is_standard(filename: str) -> bool:
    return filename.startswith(os.path.dirname(os.__file__) + os.sep) or filename.startswith("<frozen")
