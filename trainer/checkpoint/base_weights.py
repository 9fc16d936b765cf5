"""The base weights that adapters are trained on.

An adapter checkpoint does not contain the base weights, but it records their SHA-256. A merged
export reads the base weights again to combine them with the adapters into one model.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import Share
from trainer.checkpoint.shards import Shards
from trainer.config import ConfigError
from trainer.model.adapter_names import Places, is_adapter, unplaced
from trainer.model.quantized import weights_in
from trainer.model.weight_files import weight_files
from trainer.model.weights import StoredTensor
from trainer.runtime import distributed
from trainer.runtime.environment import local_rank, ranks_on_machine


@dataclass(frozen=True)
class Adapter:
    """A model's adapters.

    settings: the contents of `adapter_config.json`; base: the directory of the base model;
    whole: the whole base model on the meta device, if it has several components and only its
    language model is adapted.
    """

    settings: Mapping[str, Any]
    base: Path
    whole: PreTrainedModel | None = None

    @property
    def scaling(self) -> float:
        rank = self.settings["r"]
        divisor = math.sqrt(rank) if self.settings.get("use_rslora") else rank
        return float(self.settings["lora_alpha"] / divisor)

    def trained_in_full(self, names: Iterable[str], places: Places) -> dict[str, str]:
        """Return {parameter of a module that is trained in full: the saved parameter with its
        values}. They differ for a tied head, which is saved under the name of the embeddings.

        names: the saved parameters.
        """
        in_full = {name: name for name in names if not is_adapter(name)}
        for module in self.settings["modules_to_save"] or ():
            weight = f"{unplaced(module, places)}.weight"
            if weight not in in_full:
                in_full[weight] = next(name for name in in_full if name.endswith(".weight"))
        return in_full


def digest_together(directory: Path) -> str:
    """Return one SHA-256 for the weights in `directory`. Collective.

    The ranks on a machine divide the files of its copy among themselves. Raises `ConfigError` if a
    file cannot be read, or if two machines hold different weights.
    """
    own: dict[str, str] | ConfigError
    try:
        own = _hashes(directory, share=(local_rank(), ranks_on_machine()))
    except ConfigError as error:
        own = error
    except OSError as error:
        own = ConfigError(f"model.partial_pretrain={directory}: weights cannot be read: {error}")
    hashes: dict[str, str] = {}
    for part in distributed.gather(own):
        if isinstance(part, ConfigError):
            raise part
        for name, sha256 in part.items():
            if hashes.setdefault(name, sha256) != sha256:
                raise ConfigError(
                    f"model.partial_pretrain={directory}: {name} differs between the machines.\n"
                    f"Fix: copy the directory of one machine to the others"
                )
    return _digest(hashes)


def digest(directory: Path) -> str:
    return _digest(_hashes(directory, share=(0, 1)))


def _digest(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _hashes(directory: Path, *, share: Share) -> dict[str, str]:
    """Return file name -> SHA-256 for share `(index, count)` of the weight files."""
    index, count = share
    files = weight_files(directory)[index::count]
    # Files in the Hub's cache are symbolic links.
    return {file.name: fsio.sha256_of(file.resolve()) for file in files}


def base_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a base model by their names in its files.

    Raises `ConfigError` if the weights are not stored as safetensors.
    """
    files = weight_files(directory)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ConfigError(
            f"'{directory}' has no safetensors files to merge adapters with.\n"
            f"Fix: export only the adapters, with hf_model in trainer.checkpoint.save_contents"
        )
    return weights_in(directory)


def stored_name(names: Mapping[str, str], name: str) -> str:
    """Return the name of a weight in a base model's files.

    names: name in the model -> name in the files. Some files leave out the first component of the
    name (the module without the head). Raises `ConfigError` if the files lack the weight.
    """
    for known in (name, name.partition(".")[2]):
        if known in names:
            return names[known]
    raise ConfigError(
        f"the files of the base model have no tensor '{name}' to merge an adapter with: adapters "
        f"on experts, and on weights that the files store differently, cannot be merged.\n"
        f"Fix: export only the adapters, with hf_model in trainer.checkpoint.save_contents or, for "
        f"a checkpoint, with --lora adapter"
    )


def merged(stored: Tensor, trained: str, shards: Shards, adapter: Adapter) -> Tensor:
    """Return the float32 sum of a base tensor and the adapter whose `lora_A` parameter is
    `trained`, or the parameter `trained` itself if it was trained in full.

    The sum equals peft's own merge into a float32 model.
    """
    if not is_adapter(trained):
        return shards.whole(trained)
    added = shards.whole(trained.replace(".lora_A.", ".lora_B.")) @ shards.whole(trained)
    if adapter.settings.get("fan_in_fan_out"):
        added = added.T
    return stored.float() + added * adapter.scaling
