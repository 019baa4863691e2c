"""Five pictures of a trace and its verdict, drawn with matplotlib (`pip install 'nantrace[plot]'`).

Each takes plain values and `ax=`, and returns the Axes. Without `ax` it makes a figure of its own through pyplot, so
that a notebook shows it; with `ax` pyplot is not touched. What had to be joined is said below the picture.
All can be read in grey: shapes, hatches and line styles tell what colours tell.

Example:
    >>> from nantrace.render import plot
    >>> trace = nantrace.load("step.h5")
    >>> plot.ranges(trace, nantrace.diagnose(trace)).figure.savefig("ranges.png")
"""

from nantrace.render.plot.headroom import headroom
from nantrace.render.plot.ledger import ledger
from nantrace.render.plot.matrix import matrix
from nantrace.render.plot.path import path
from nantrace.render.plot.ranges import ranges

__all__ = ["headroom", "ledger", "matrix", "path", "ranges"]
