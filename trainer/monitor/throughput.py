"""How fast training goes: over one step, over a window, and against what the device could do."""

import statistics
from collections import deque

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "A6000": 155.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
    "MI250X": 383.0,
}
"""Dense bfloat16 peak by name of the device (vendors' data sheets); the longest name that fits counts."""
WINDOW_STEPS = 100
NUM_WARMUP_STEPS = 2
"""Of an attempt: the first steps load kernels and compile."""


def peak_tflops(device_name: str) -> float | None:
    """None for a device that is not in the table: a guess would look like a measurement."""
    fitting = [name for name in PEAK_TFLOPS if name.lower().replace(" ", "") in device_name.lower().replace(" ", "")]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


class Window:
    """Tokens and seconds of the last `WINDOW_STEPS` steps of this attempt, without its first two."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)

    def add(self, num_tokens: int, step_s: float) -> None:
        self._num_seen += 1
        if self._num_seen > NUM_WARMUP_STEPS or not self._steps:
            if self._num_seen == NUM_WARMUP_STEPS + 1:
                self._steps.clear()
            self._steps.append((num_tokens, step_s))

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for tokens, _ in self._steps) / sum(seconds for _, seconds in self._steps)

    @property
    def median_step_s(self) -> float:
        return statistics.median(seconds for _, seconds in self._steps)
