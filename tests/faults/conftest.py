"""Makes the helpers of the unit tests available to the fault tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
