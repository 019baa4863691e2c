"""Has Triton interpret its kernels: it decides when it is first imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
