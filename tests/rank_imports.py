"""The modules that the server of `rank_server.py` imports, so that ranks need not. Importing them
took a rank more than half a second.
"""

import gc
import importlib

for _name in (
    "pytest",  # by the file whose function is called
    "toy_runs",
    "whole_runs",
    "trainer.__main__",
    "trainer.cli.__main__",
    "trainer.optim.adamw",
    "trainer.tools.report.page",
    "trainer.tools.report.readers",
    "trainer.train.start.compose",
    "trainer.train.start.main",
    "logging.config",
    "multiprocessing.synchronize",
    "peft",
    "torch.profiler",
    "torch.utils.serialization",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
):
    importlib.import_module(_name)

# the collector of a rank would otherwise write to, and so copy, all that it shares with the server
gc.collect()
gc.freeze()
