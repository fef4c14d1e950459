"""Peak arithmetic of a device, from which training computes its model FLOP utilisation (MFU)."""

from __future__ import annotations

import time

import torch

# dense bf16/fp16 peaks of the vendors' data sheets, TFLOP/s; for float32 and other devices the peak is measured
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "L40S": 362.0, "A10G": 70.0}


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the peak operations per second of one device and the source of the number: "data sheet" or "measured"."""
    if device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAK_TFLOPS.items():
            if known in name:
                return tflops * 1e12, "data sheet"
    return measured_flops(device, precision), "measured"


def measured_flops(device: torch.device, precision: str, size: int = 1024, repeats: int = 4) -> float:
    """Return the operations per second of the fastest of `repeats` square matrix products."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    size = size if device.type == "cpu" else 8 * size
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        synchronise(device)
        started = time.perf_counter()
        left @ left
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that durations are right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
