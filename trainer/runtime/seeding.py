"""Random numbers keyed by their purpose, so that no result depends on a generator's state."""

import hashlib
import os
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.runtime.progress import MAIN


def key(*parts: int | str) -> int:
    """Return a 63-bit seed. Equal parts give equal seeds on every machine and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Seed every generator for one optimizer step, counted from 1, so that the dropout of step k
    does not depend on how the run reached it.

    The key counts from 0, so that runs of earlier versions continue with the same numbers.
    """
    value = key("step", seed, step - 1, rank)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def use_deterministic_kernels() -> None:
    """Fix the order of sums on a GPU (backward pass of attention, cuBLAS, NCCL).

    Call it before the first CUDA call. Torch raises an error if an operation has no deterministic
    kernel.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_PROTO", "Simple")
    torch.use_deterministic_algorithms(True)
    # nothing reads memory before it is written, and filling it costs a pass over all of it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class GeneratorState:
    """The states of torch's generators on `device`. Each step reseeds all generators, so when the
    number of ranks changes, the state of any rank is suitable.
    """

    device: torch.device
    state_of: ClassVar = MAIN

    def state_dict(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)
