"""Peak arithmetic of a device, from which training computes its model FLOP utilisation (MFU)."""

import torch

# dense bf16/fp16 peaks of the vendors' data sheets, TFLOP/s
PEAK_TFLOPS = {
    "A100": 312.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "L40S": 362.0,
    "A10G": 70.0,
}  # fmt: skip


def peak_flops(device: torch.device, precision: str, tflops: float | None) -> float | None:
    """Return the peak operations per second of one device: `tflops`, else the vendor's figure, None if it is unknown."""
    if tflops is None and device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        tflops = next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
    return tflops and tflops * 1e12


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that durations are right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
