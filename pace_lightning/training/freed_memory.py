"""On CPU, memory that tensors gave back stays with the process.

glibc returns large blocks to the system when they are freed. An optimizer step frees and asks again
for gigabytes of activations and gradients, and the system hands them out page by page, each of them
zeroed at its first touch. The price is memory: holes between blocks are not given back.
"""

from __future__ import annotations

import ctypes
import os

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of ``mallopt``, as in glibc's ``malloc.h``."""

_GROWTH = 256 << 20
"""Bytes by which the heap grows at least."""


def keep_freed_memory() -> bool:
    """Tell the allocator of this process, for all that it allocates from now on.

    Returns:
        Whether it was told: not where the trainer has a GPU, on another C library than glibc, or
        where the user's environment has settings for the allocator (``MALLOC_*``, or
        ``glibc.malloc`` in ``GLIBC_TUNABLES``).
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if torch.cuda.is_available():
        return False
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _GROWTH))
    return all(c_library.mallopt(name, value) == 1 for name, value in settings)
