"""Freed memory stays with the process: page faults are counted in a process of its own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import resource, sys
from harness.malloc import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for step in range(21):
    if step == 1:  # after the first step, which needs new pages in any case
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(8 * 2**20) for _ in range(4)]
    del blocks
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> tuple[str, int]:
    """Return what keep_freed_memory answered and the page faults of 20 steps that need 32 MiB each."""
    root = Path(__file__).parents[1]
    said = subprocess.run(
        [sys.executable, "-c", COUNT, mode], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    return said[0], int(said[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_freed_memory_is_used_again() -> None:
    usual = faults("as usual")[1]
    answer, kept = faults("keep")
    assert answer == "True" and 10 * kept < usual
