"""On a real GPU: FIRE is the same as on the CPU, and every script runs there, stops and resumes. Skipped without one."""

import pytest
import torch

from benchmarks.proof import PROOF, fire_difference, stop_and_resume

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA can use")


@pytest.mark.parametrize("ambient", ["highest", "high"])
def test_fire_on_cuda_equals_the_cpu(ambient):
    assert fire_difference("cuda", ambient) < 1e-3


@pytest.mark.parametrize("domain", PROOF)
def test_a_smoke_run_stops_and_resumes_on_cuda(domain, tmp_path):
    assert stop_and_resume(domain, "cuda", tmp_path) == ""
