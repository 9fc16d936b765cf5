"""How users call the commands (floor 1, no torch)."""

from pathlib import Path

_SCRIPT = Path(__file__).resolve().parents[2] / "run_sft.sh"


def call(words: str) -> str:
    """`bash run_sft.sh WORDS` in a checkout, `fsdp-sft WORDS` of an installed package."""
    return f"{'bash run_sft.sh' if _SCRIPT.is_file() else 'fsdp-sft'} {words}"
