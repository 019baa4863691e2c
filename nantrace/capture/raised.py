"""What is kept of the exception that ended a traced block: its type and one line, without paths of this machine."""

from __future__ import annotations

import re

from nantrace.events import Raised

_LONGEST = 160  # characters of the message

# The folders of an absolute path: "/home/me/data/" of "/home/me/data/x.bin".
_PART = r"""[^\s'"<>|:*?,;()\\/]"""
_FOLDERS = re.compile(rf"(?<![\w.\\/])(?:~|[A-Za-z]:)?[\\/]+(?:{_PART}+[\\/]+)*(?={_PART})")


def raised(error: BaseException, step: int | None) -> Raised:
    """The exception as a value; `step` is the one that it broke off, None between steps."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception of the user's that cannot even say what it is
        lines = []
    message = without_folders(lines[0]) if lines else ""
    message = message if len(message) <= _LONGEST else message[: _LONGEST - 3] + "..."
    return Raised(type(error).__name__[:_LONGEST], message, step)


def without_folders(text: str) -> str:
    """The text with every absolute path cut down to its last part."""
    return _FOLDERS.sub("", text)
