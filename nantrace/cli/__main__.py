"""`python -m nantrace.cli` is `nantrace`."""

from __future__ import annotations

from nantrace.cli import main

main()
