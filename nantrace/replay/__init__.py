"""Replaying a step: snapshot, search, bisect, reproducer."""
