"""Imports single files of an installed verl without its heavy dependencies; for the scripts run by
VERL_PYTHON.

`import verl` needs ray, tensordict and omegaconf. None of them takes part in merging a checkpoint:
empty packages with verl's own paths stand in for the `__init__.py` files.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

_EMPTY_PACKAGES = (
    "verl",
    "verl.utils",
    "verl.single_controller",
    "verl.trainer",
    "verl.workers",
    "verl.workers.config",
    "verl.workers.engine",
    "verl.workers.engine.fsdp",
)


def prepare():
    """Make verl's files importable one by one, each by its own full name."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations, "this interpreter has no verl"
    root = spec.submodule_search_locations[0]
    for name in _EMPTY_PACKAGES:
        module = ModuleType(name)
        module.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = module
    tokenizer = importlib.import_module("verl.utils.tokenizer")
    utils = sys.modules["verl.utils"]
    utils.hf_tokenizer = tokenizer.hf_tokenizer
    utils.hf_processor = tokenizer.hf_processor
