"""The exceptions and the warning of nantrace.

Every error inherits from `NantraceError` and, where one fits, from the builtin that a caller would already catch.
Each message is one sentence: what was found, with the value; where; what to do.
"""


class NantraceError(Exception):
    """Base of every error that nantrace raises on its own account."""


class TraceFormatError(NantraceError, ValueError):
    """A file is not a nantrace trace, or one that this version cannot read."""


class TraceExistsError(NantraceError, FileExistsError):
    """The path of a new trace is taken."""


class NonfiniteError(NantraceError, RuntimeError):
    """A traced step went nonfinite and `on_nonfinite="raise"` was asked for."""


class ReplayError(NantraceError, RuntimeError):
    """A step cannot be replayed."""


class CaptureError(NantraceError, ValueError):
    """A captured step cannot be read, or does not belong to this model."""


class MissingExtraError(NantraceError, ImportError):
    """An optional package that this needs is not installed."""


class NantraceWarning(UserWarning):
    """What nantrace found or could not do while training goes on."""


class RecipeWarning(NantraceWarning):
    """A step departs from the recipe of mixed precision, whether or not it has gone nonfinite yet."""
