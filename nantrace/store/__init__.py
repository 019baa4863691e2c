"""The trace file. The only package that imports h5py."""

from nantrace.store.reader import load
from nantrace.store.writer import TraceWriter, rank_path

__all__ = ["TraceWriter", "load", "rank_path"]
