"""Where the command line's words go: what is written where, how wide, and how a command ends.

Knows streams, terminals and exit codes; no command and no trace. A stream that cannot be written to is one sentence;
a reader that has gone away (`| head`) is none, since nobody is left to read it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from nantrace.errors import NantraceError
from nantrace.render.cells import harmless

FAULT, ERROR, INTERRUPTED = 1, 3, 130
_NARROW, _WIDE, _DEFAULT = 40, 240, 80  # columns
_PACE = 2.0  # seconds


class Progress:
    """Lines about work under way, on stderr; remembers how far it got."""

    def __init__(self) -> None:
        self.last: str | None = None

    def __call__(self, line: str) -> None:
        self.last = line
        note(line)

    def __str__(self) -> str:
        return f"it had got as far as {self.last!r}" if self.last else "no replay had ended"


class UnderWay:
    """A line on stderr while work goes on: what it last told, and for how many seconds it has been going on.

    It appears after two seconds, is rewritten every two, and is gone at the end; where stderr is no terminal, there is
    none. A thread writes it, so that work which has nothing to tell for a while is seen to go on.

    Attributes:
        shown: the last line that was written; None if there was none.
    """

    def __init__(self, pace: float = _PACE) -> None:
        self.shown: str | None = None
        self._told, self._pace, self._done = "working", pace, threading.Event()
        seen = sys.stderr is not None and sys.stderr.isatty()
        self._writer = threading.Thread(target=self._write, daemon=True) if seen else None

    def __enter__(self) -> UnderWay:
        if self._writer is not None:
            self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._writer is not None:
            self._writer.join()
        if self.shown is not None and not _is_dumb():
            note("\r\x1b[K", end="")

    def __str__(self) -> str:
        return f"it had got as far as {self.shown!r}" if self.shown else ""

    def tell(self, line: str) -> None:
        """Called by the work, as often as it likes."""
        self._told = line

    def _write(self) -> None:
        began = time.monotonic()
        while not self._done.wait(self._pace):
            self.shown = harmless(self._told)  # it may name a tensor out of a foreign file
            line = f"{self.shown}, {time.monotonic() - began:.0f} s"
            if _is_dumb():
                note(line)
            else:
                note(f"\r\x1b[K{line[: _columns_of_stderr() - 1]}", end="")


def say(text: str) -> None:
    """Write to stdout.

    Raises:
        OSError: it cannot be written, for another reason than that its reader has gone away.
    """
    stream = sys.stdout
    if stream is None:  # closed by the caller's shell
        return
    try:
        stream.write(_writable(text, stream) + "\n")
        stream.flush()
    except BrokenPipeError:
        _abandon(stream)
    except OSError:
        _abandon(stream)
        raise


def note(text: str, end: str = "\n") -> None:
    """Write to stderr, if anybody can."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(_writable(text, stream) + end)
        stream.flush()
    except OSError:
        _abandon(stream)


def fail(sentence: str, code: int = ERROR) -> NoReturn:
    """End the command with one sentence on stderr."""
    note(f"nantrace: {sentence}")
    sys.exit(code)


@contextlib.contextmanager
def sentences(so_far: Callable[[], object] = str) -> Iterator[None]:
    """Errors of nantrace, of the output and from the keyboard become one sentence and an exit code.

    Args:
        so_far: asked how far a command got that was interrupted.
    """
    try:
        yield
    except NantraceError as error:
        fail(str(error))
    except KeyboardInterrupt:
        reached = str(so_far())
        fail(f"interrupted{f'; {reached}' if reached else ''}.", INTERRUPTED)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """`OSError`s of an output become a sentence that names it."""
    try:
        yield
    except NantraceError:  # a sentence already, though some are `OSError`s too
        raise
    except OSError as error:
        fail(f"{what} cannot be written ({error.strerror}): choose another place for it.")


def width() -> int:
    """Columns: those of COLUMNS, else the terminal's, within reason; 80 where there is neither."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return min(max(int(given), _NARROW), _WIDE)
    if not is_terminal():
        return _DEFAULT
    return min(max(shutil.get_terminal_size((_DEFAULT, 24)).columns, _NARROW), _WIDE)


def colour() -> bool:
    return is_terminal() and not os.environ.get("NO_COLOR") and not _is_dumb()


def knows_unicode() -> bool:
    encoding: Any = getattr(sys.stdout, "encoding", None)
    return str(encoding or "ascii").lower().replace("-", "") in ("utf8", "utf16", "utf8sig")


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _is_dumb() -> bool:
    """Whether the terminal cannot go back in its line."""
    return os.environ.get("TERM") == "dumb"


def _columns_of_stderr() -> int:
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or _DEFAULT
    return _DEFAULT


def _writable(text: str, stream: Any) -> str:
    """`text` with what the stream's encoding does not have written as escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _abandon(stream: Any) -> None:
    """Lead what is still buffered, and the interpreter's last flush, to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
