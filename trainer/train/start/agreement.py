"""Equal inputs on all ranks before the first step: each rank reads its own copy of data and model.

`facts_of` collects it once the inputs are prepared; `runtime.distributed.start` compares it as soon
as ranks meet. `require_model_unchanged` covers the time until each rank has loaded its weights.
"""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from trainer.checkpoint.model_files import CONFIG, ModelFiles
from trainer.config import ConfigError
from trainer.data.tokens import tokenizer_digest
from trainer.model.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model.sampled_weights import digest_of_weights
from trainer.model.weight_files import weight_files
from trainer.runtime.json_lines import flat
from trainer.train.start.inputs import Inputs

DIGITS = 16
NONE = "none"
OWN_OF_A_MACHINE = (
    "data.cache_dir",
    "data.chat_template",
    "data.num_workers",
    "data.train_files",
    "data.val_files",
    "model.lora_adapter_path",
    "model.partial_pretrain",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.resume_from_path",
)
"""Keys that may differ: paths, whose contents are compared in their place, and what changes no
number.
"""


def facts_of(inputs: Inputs, *, progress: Callable[[], None]) -> dict[str, str]:
    """All that the ranks must agree on, by name: digests of what was read, and the settings.

    `progress` is called as weights are read. Raises `ConfigError`.
    """
    config, contents = inputs.config, inputs.model_files.contents
    weights = "random"
    if not inputs.source.random_weights:
        files = weight_files(inputs.model_files.directory)
        weights = digest_of_weights(files, progress=progress)[:DIGITS]
    bare_tokenizer = copy.copy(inputs.tokenizer)
    bare_tokenizer.chat_template = None
    facts = {
        "config.json": _digest(contents[CONFIG]),
        "weights": weights,
        "tokenizer": tokenizer_digest(bare_tokenizer)[:DIGITS],
        "chat template": _digest(str(inputs.tokenizer.chat_template).encode()),
        "training data": inputs.train.fingerprint,
        "validation data": NONE if inputs.validation is None else inputs.validation.fingerprint,
    }
    if config.model.trust_remote_code:
        code = (content for name, content in contents.items() if name.endswith(".py"))
        facts["model code"] = _digest(*code)
    if config.model.lora_adapter_path is not None:
        adapter = Path(config.model.lora_adapter_path)
        names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        facts["adapter"] = _digest(*((adapter / name).read_bytes() for name in names))
    settings = {
        name: json.dumps(value, default=str) for name, value in flat(config.resolved).items()
    }
    return facts | {name: settings[name] for name in settings if name not in OWN_OF_A_MACHINE}


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:DIGITS]


def require_model_unchanged(files: ModelFiles) -> None:
    """Raise `ConfigError` on all ranks if a file of the model has changed on any of them.
    Collective.

    To be called once every rank has loaded its weights and copied what exports need: the digests of
    `facts_of` then hold for both.
    """
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, files.changes())
    if changed := sorted({change for changes in found for change in changes}):
        raise ConfigError(
            f"the files of model.partial_pretrain='{files.directory}' changed while this run read "
            f"them: {', '.join(changed)}; what was loaded may be partly old and partly new.\n"
            f"Fix: start again with the same command when nothing writes to that directory"
        )
