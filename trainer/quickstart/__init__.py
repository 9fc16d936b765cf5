"""The embedded default (floor 2): a tiny model, its tokenizer and a generated instruction set, without network."""

from trainer.quickstart.files import QuickstartFiles, ensure_quickstart

__all__ = ["QuickstartFiles", "ensure_quickstart"]
