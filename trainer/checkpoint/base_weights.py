"""The base weights under the adapters.

An adapter checkpoint does not contain the base weights, but it records their SHA-256. A merged
export reads the base weights again to combine them with the adapters into one model.
"""

import hashlib
import json
import math
from collections import defaultdict
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
from trainer.model import lora_layers
from trainer.model.adapter_names import Places, is_adapter, placed, unplaced
from trainer.model.quantized import weights_in
from trainer.model.weight_files import weight_files
from trainer.model.weights import StoredTensor
from trainer.runtime import distributed
from trainer.runtime.environment import local_rank, ranks_on_machine


@dataclass(frozen=True)
class Adapter:
    """A model's adapters.

    settings: the contents of `adapter_config.json`; base: the directory of the base model; whole:
    the entire base model on the meta device, if it has several components and only its language
    model is adapted.
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

    The ranks on a machine divide the files of its copy among themselves. Raises `ConfigError` on
    all ranks if one of them cannot read a file, or if two machines hold different weights.
    """
    own: dict[str, str] | ConfigError
    try:
        own = _hashes(directory, share=(local_rank(), ranks_on_machine()))
    except ConfigError as error:
        own = error
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
    """Return file name -> SHA-256 for share `(index, count)` of the weight files.

    Raises `ConfigError` if a file cannot be read.
    """
    index, count = share
    files = weight_files(directory)[index::count]
    try:
        # Files in the Hub's cache are symbolic links.
        return {file.name: fsio.sha256_of(file.resolve()) for file in files}
    except OSError as error:
        raise ConfigError(f"cannot read the weights in '{directory}': {error}") from error


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


@dataclass(frozen=True)
class Change:
    """A change that training made to a weight of the base model.

    trained: the `lora_A` parameter of its adapter, or the parameter with its new values; scaling:
    the factor of the adapter's product; is_transposed: True if the rows of the weight are inputs;
    the rows of the adapter's product are always outputs.
    """

    trained: str
    scaling: float = 1.0
    is_transposed: bool = False

    def applied(self, stored: Tensor, shards: Shards) -> Tensor:
        """Return the float32 sum of a base weight and its adapter's product, or the new values.

        The sum equals peft's own merge into a float32 model.
        """
        if not is_adapter(self.trained):
            return shards.whole(self.trained)
        down = shards.whole(self.trained).float()
        up = shards.whole(self.trained.replace(".lora_A.", ".lora_B.")).float()
        if stored.ndim == 3:  # E experts, R rank, I inputs, O outputs
            down = down.view(len(stored), -1, down.shape[1])  # ERI
            up = up.view(len(up), -1, len(stored)).permute(2, 0, 1)  # EOR
        added = (up @ down).mul_(self.scaling)
        if self.is_transposed:
            added = added.mT
        return added.add_(stored)  # in place: stacked experts are large


def changes_of(
    adapter: Adapter,
    names: Iterable[str],
    in_full: Mapping[str, str],
    text: PreTrainedModel | None,
    places: Places,
) -> dict[str, Change]:
    """Return the changes of the base model's weights, by their names in the language model `text`.

    names: the saved parameters; in_full: the result of `Adapter.trained_in_full`; text: None if
    transformers does not know the architecture.
    """
    targets = adapter.settings.get("target_parameters") or ()
    stacked = defaultdict[str, list[str]](list)
    for weight in lora_layers.expert_weights(text) if text is not None else ():
        if placed(weight, places) in targets:
            stacked[weight.rpartition(".")[0]].append(weight)
    changes = {name: Change(own_name) for name, own_name in in_full.items()}
    for name in names:
        if ".lora_A." not in name:
            continue
        layer = name.partition(".lora_")[0]
        module = layer.replace(".base_layer", "")
        weight = f"{layer}.weight"
        is_transposed = bool(adapter.settings.get("fan_in_fan_out"))
        if text is not None and module in stacked:
            # peft wraps the module once for each weight; the wrapper of the last one is outermost
            weight = stacked[module][-1 - layer.count(".base_layer")]
            is_transposed = bool(text.get_submodule(module).is_transposed)
        changes[weight] = Change(name, adapter.scaling, is_transposed)
    return changes
