"""What `torch.autograd.detect_anomaly` says of a step, where it can be right: after a forward that was finite.

For a value born in forward it names the wrong node, often the loss line, and it is silent on an infinity.
"""

from __future__ import annotations

import os
import re
import sysconfig
import warnings

import torch

import nantrace
from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.flow.source import line_of_source
from nantrace.replay.ends import Ends, describe
from nantrace.replay.replays import Replays, called

_NODE = re.compile(r"Function '([^']+)' returned nan")
_FRAMES = 3
#: The frame that calls the step.
_REPLAYED = (called.__code__.co_filename, called.__name__)
_NOT_THE_USERS = (
    *(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, nantrace)),
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<frozen",
)


def is_on() -> bool:
    """Whether anomaly mode is on, whoever switched it on."""
    return torch.is_anomaly_enabled()


def anomaly_evidence(replays: Replays, first: Ends) -> tuple[str, ...]:
    """Sentences: the node it stopped at with its forward stack, or why it was not asked or could not tell."""
    if not first.forward_was_finite:
        return (
            "detect_anomaly was not run: the loss was nonfinite already, and then it names the loss line or another "
            "wrong node.",
        )
    if not first.failed:
        return ("detect_anomaly was not run: no end of the step is nonfinite.",)
    if replays.left < 1:
        return ("detect_anomaly was not run: no replay was left.",)
    # It raises where it stops, and the step goes no further: what it ends with is never to be compared.
    with replays.one("under detect_anomaly", same=False) as listener, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with eager_instead_of_compiled(), torch.autograd.detect_anomaly(check_nan=True):
            returned, error = called(replays.step)
        listener.ended(returned, error)
    stopped = _NODE.search(str(error)) if error is not None else None
    if stopped is None:
        raised = f", and the step raised {describe(error)}" if error is not None else ""
        return (f"detect_anomaly stopped at no node: no backward node returned NaN{raised}.",)
    lines = _forward_lines([str(warning.message) for warning in caught])
    where = f", made in forward at {' < '.join(lines)}" if lines else ""
    return (f"detect_anomaly stopped at {stopped.group(1)}{where}.",)


def _forward_lines(messages: list[str]) -> list[str]:
    """The innermost lines of the user's in the traceback of the forward call that anomaly mode prints."""
    text = next((m for m in messages if "Traceback of forward call" in m or "forward call that caused" in m), "")
    frames: list[tuple[str, str, str]] = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    # Outermost first: what lies before the replay is whoever asked for it, the command line or a test runner.
    begins = max((at for at, (file, _, name) in enumerate(frames) if (file, name) == _REPLAYED), default=-1)
    own = [line_of_source(file, int(line), name) for file, line, name in frames[begins + 1 :] if _is_own(file)]
    return own[::-1][:_FRAMES]


def _is_own(file: str) -> bool:
    return "site-packages" not in file and "dist-packages" not in file and not file.startswith(_NOT_THE_USERS)
