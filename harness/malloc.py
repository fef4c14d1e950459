"""Freed memory on Linux: kept for the next step of training instead of handed back to the system."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_TRIM, LARGEST_MMAP = 2**31 - 1, 2**25  # what glibc accepts: a C int, and half of its largest heap


def keep_freed_memory() -> None:
    """Let freed blocks below 32 MiB stay with this process, where the C library can.

    By default, glibc gives the end of its heap back as soon as it is free. A training step then asks for the same
    pages again and again, and the system clears each of them: about a tenth of the time of a small GPT on a CPU.
    The numbers of a run do not change. Larger blocks, such as a replay buffer, are still given back.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)
        library.mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM)
