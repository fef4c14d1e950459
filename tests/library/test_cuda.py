"""On a real GPU: FIRE is the same as on the CPU, and every script runs there, stops and resumes. Skipped without one."""

import pytest
import torch

from benchmarks.proof import prove


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA can use")
def test_what_must_hold_on_cuda_does():
    assert prove("cuda") == []
