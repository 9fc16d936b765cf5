"""Checks that all ranks have equal inputs before the first step, because each rank reads its own
copies.

`facts_of` computes digests of the prepared inputs, and `runtime.distributed.start` compares them as
soon as the ranks are connected. `require_model_unchanged` covers the time until each rank has
loaded its weights.
"""

import hashlib
import json
from pathlib import Path

from trainer.checkpoint.model_files import CONFIG, ModelFiles
from trainer.config import ConfigError
from trainer.model.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model.sampled_weights import digest_of_weights
from trainer.model.weight_files import weight_files
from trainer.runtime import distributed
from trainer.runtime.json_lines import flat
from trainer.train.start.inputs import Inputs, Progress

DIGITS = 16
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
"""Keys that may differ between ranks: paths, whose contents are compared instead, and keys that do
not affect results.
"""


def facts_of(inputs: Inputs, *, progress: Progress) -> dict[str, str]:
    """Return digests of the inputs, and the settings, by name. All must be equal on all ranks.

    Calls `progress` while it reads weights. Raises `ConfigError`.
    """
    config = inputs.config
    contents = inputs.model_files.contents
    facts = {
        "config.json": _digest(contents[CONFIG]),
        "tokenizer": inputs.tokenizer_digest[:DIGITS],
        "chat template": _digest(str(inputs.tokenizer.chat_template).encode()),
        "training data": inputs.train.fingerprint,
    }
    if inputs.validation is not None:
        facts["validation data"] = inputs.validation.fingerprint
    if not inputs.source.random_weights:
        files = weight_files(inputs.model_files.directory)
        facts["weights"] = digest_of_weights(files, progress=progress)[:DIGITS]
    if config.model.trust_remote_code:
        code = [content for name, content in contents.items() if name.endswith(".py")]
        facts["model code"] = _digest(*code)
    if config.model.lora_adapter_path is not None:
        adapter = Path(config.model.lora_adapter_path)
        names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        facts["adapter"] = _digest(*((adapter / name).read_bytes() for name in names))
    for name, value in flat(config.resolved).items():
        if name not in OWN_OF_A_MACHINE:
            facts[name] = json.dumps(value, default=str)
    return facts


def _digest(*parts: bytes) -> str:
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:DIGITS]


def require_model_unchanged(files: ModelFiles) -> None:
    """Raise `ConfigError` on all ranks if a model file has changed on any rank. Collective.

    Call this once every rank has loaded its weights and copied the files that exports need.
    """
    found = distributed.gather(files.changes())
    if changed := sorted({change for changes in found for change in changes}):
        raise ConfigError(
            f"the files of model.partial_pretrain='{files.directory}' changed while this run read "
            f"them: {', '.join(changed)}.\n"
            f"Fix: make sure that nothing writes to that directory, then run the same command again"
        )
