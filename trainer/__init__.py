"""FSDP2 supervised fine-tuning. `python -m trainer` runs one rank; `bash run_sft.sh N` runs N."""

__version__ = "0.1.0"
