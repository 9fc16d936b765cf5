"""The peak speeds of devices, for MFU."""

import re

import torch

_NAMES = {
    2250.0: ("B200", "B300"),
    2500.0: ("GB200", "GB300"),
    989.0: ("H100", "H200", "GH200", "H800"),
    756.0: ("H100 PCIe", "H800 PCIe"),
    835.0: ("H100 NVL", "H200 NVL"),
    148.0: ("H20",),
    312.0: ("A100", "A100 PCIe", "A800"),
    149.7: ("A40",),
    165.0: ("A30", "RTX 4090"),
    125.0: ("A10",),
    70.0: ("A10G",),
    121.0: ("L4",),
    181.0: ("L40",),
    362.0: ("L40S",),
    155.0: ("RTX A6000",),
    209.5: ("RTX 5090",),
    71.0: ("RTX 3090",),
    191.5: ("MI250X",),
    1307.0: ("MI300X", "MI325X"),
}
PEAK_TFLOPS = {name: peak for peak, names in _NAMES.items() for name in names}
"""Peak TFLOP/s by the words of the device's name: dense bfloat16 with sums in float32.

The values come from the vendors' data sheets, most of which state the doubled figure for sparse
matrices. Sources: NVIDIA's data sheet for each product (H100 and H800 without a suffix are SXM),
AWS's for the A10G, AMD's for the Instinct series (an MI250X is two devices), and, for GeForce,
NVIDIA's white papers on Ampere, Ada and Blackwell.
"""
OTHER_DEVICE = re.compile(r"mig|\d+[abcq]|laptop|max|d|ti|super")
"""Words that rule out a match with the table: the device is a slice of a GPU (MIG, or `40C` for a
virtual GPU), or a different variant.
"""


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's peak in TFLOP/s; None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    return PEAK_TFLOPS.get(known_as(torch.cuda.get_device_name(device)) or "")


def known_as(device_name: str) -> str | None:
    """Return the device's name in the table; None if the table lacks the device.

    Other devices are not guessed, because a guess would look like a measurement.
    """
    words = _words(device_name)
    if any(map(OTHER_DEVICE.fullmatch, words)):
        return None
    fitting = [name for name in PEAK_TFLOPS if _words(name) <= words]
    return max(fitting, key=len, default=None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
