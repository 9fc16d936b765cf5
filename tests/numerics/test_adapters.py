"""LoRA compared with peft's own forward pass and autograd in a plain loop, in every execution mode;
refusals; costs.
"""

import json
from pathlib import Path

import plain_training
import pytest
import torch
from family_trials import family_config
from peft import IA3Config, LoraConfig, get_peft_model, inject_adapter_in_model
from ranks import each, run_ranks
from safetensors.torch import save_file
from test_invariance import plain_run, train
from toy import ToySamples, build_toy_model, differing, model_config, relative, write_model_config
from toy_runs import source as source  # a fixture
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from whole_models import write_whole_model

from trainer.checkpoint.shards import Shards
from trainer.checkpoint.state import ModelShards
from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model import adapters, assemble, lora_layers
from trainer.model.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_name
from trainer.model.pretrained import ModelSource
from trainer.train.start.compose import load_config


def write_adapter(model, path, **settings):
    """One that adds something from the start."""
    torch.manual_seed(5)
    config = LoraConfig(
        **({"r": 3, "lora_alpha": 8, "target_modules": "all-linear"} | settings),
        init_lora_weights=False,
    )
    get_peft_model(model, config).save_pretrained(path)
    return str(path)


def plain_model(path, **settings):
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), dtype=torch.float32, **settings
    )


def assert_as_plain(source, adapter, ways):
    """Training this adapter gives the losses and norms of the plain loop with peft, with `ways` =
    {number of ranks: {name: settings of the run}}.
    """
    plain = plain_run(source, adapter)
    losses = plain["train/loss"]
    norms = plain["train/grad_norm"]
    for num_ranks, settings in ways.items():
        common = {"lora_adapter_path": adapter, "random_weights": source.random_weights}
        variants = {way: {**own, **common} for way, own in settings.items()}
        for way, found in run_ranks(each, num_ranks, train, source, variants)[0].items():
            assert relative(found[0], losses) < 1e-5, way
            assert relative(found[1], norms) < 1e-5, way


ON_ONE_RANK = {1: {"one rank": {}, "one document": {"is_packed": False}}}
MICRO_BATCHES = {"micro-batches": {"max_samples": 1}}
RECOMPUTED = {"recomputed": {"enable_gradient_checkpointing": True}}


def test_adapters_train_as_in_a_plain_loop_with_peft(tmp_path):
    model = write_model_config(tmp_path / "model")
    path = write_adapter(plain_model(model.path), tmp_path / "adapter")
    on_several = {2: MICRO_BATCHES | RECOMPUTED, 4: {"fewer rows than ranks": {}}}
    assert_as_plain(model, path, ON_ONE_RANK | on_several)


def first_values(world, model, **changes):
    built = build_toy_model(world, model, **changes)
    return {name: p.full_tensor() for name, p in built.named_parameters() if ".lora_" in name}


def test_first_values_do_not_depend_on_the_number_of_ranks(source):
    one, two = (run_ranks(first_values, n, source, lora_rank=5)[0] for n in (1, 2))
    assert differing(one, two) == []
    for name, value in one.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound and value.std() > 0.5 * bound
    downs = [value for name, value in one.items() if ".lora_A." in name and value.shape == (5, 64)]
    assert not torch.equal(downs[0], downs[1]), "drawn anew for each name"


@pytest.mark.parametrize(
    ("method", "rank", "message"),
    [
        (LoraConfig(use_dora=True), 0, "more than plain LoRA .*use_dora=True"),
        (IA3Config(feedforward_modules=[]), 0, "more than plain LoRA .*IA3"),
        (LoraConfig(r=3), 9, "has rank 3"),
        (None, 0, "has no adapter_config.json"),
    ],
    ids=["DoRA", "IA3", "another rank", "no adapter"],
)
def test_an_adapter_that_cannot_be_continued_is_refused(tmp_path, method, rank, message):
    model = write_model_config(tmp_path / "model")
    if method is not None:
        method.target_modules = {"q_proj"}
        get_peft_model(plain_model(model.path), method).save_pretrained(tmp_path)
    config = model_config(lora_adapter_path=str(tmp_path), lora_rank=rank)
    with pytest.raises(ConfigError, match=message):
        assemble.design_model(config, model, max_length=64)


MIXTURES = {
    "afmoe": "shared_experts",
    "deepseek_v3": "shared_experts",
    "glm4_moe": "shared_experts",
    "hunyuan_v1_moe": "shared_mlp",
    "longcat_flash": "mlps.0",
    "qwen3_next": "shared_expert",
}
"""With the name of a dense or shared MLP whose layers peft, given as target modules, takes for
experts.
"""
OTHER_MIXTURES = ("qwen3_moe", "llama4_text", "qwen2_moe", "jetmoe")
MAMBAS = ("mamba", "mamba2", "falcon_h1")
NEVER_ADAPTED = {"experts", "router", "gate", "shared_expert_gate", "lm_head"}


def on_meta(source, **changes):
    """The model with the adapters that these keys ask for."""
    return assemble.on_meta(model_config(**{"lora_rank": 4, **changes}), source, is_packed=False)


def adapted(model):
    """Full names of its layers with an adapter."""
    return {
        name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name
    }


def adapted_by_plain_peft(source, settings):
    """Return the names of the layers that plain peft adapts with these settings."""
    with torch.device("meta"):
        plain = plain_model(source.path)
    return adapted(inject_adapter_in_model(LoraConfig(**settings), plain))


@pytest.fixture
def family(tmp_path):
    """The tiny model of a family, without weights."""

    def of(name, **changes):
        family_config(name, **changes).save_pretrained(tmp_path / name)
        return ModelSource(str(tmp_path / name), random_weights=True)

    return of


@pytest.mark.parametrize("name", [*MIXTURES, *MAMBAS, *OTHER_MIXTURES])
def test_all_linear_takes_what_can_be_adapted(family, name):
    source = family(name)
    model = on_meta(source)
    layers = adapted(model)
    parts = {part for layer in layers for part in layer.split(".")}
    assert not parts & NEVER_ADAPTED
    if name in MIXTURES:
        ends = {f"{MIXTURES[name]}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
        assert all(any(layer.endswith(end) for layer in layers) for end in ends), (
            "a dense or shared MLP is left out"
        )
    elif name in MAMBAS:
        assert "in_proj" in parts and not parts & {"out_proj", "x_proj", "dt_proj", "conv1d"}
    assert "; not adapted: " in lora_layers.summary(model, rank=4)
    assert adapted_by_plain_peft(source, adapters.settings(model)) == layers


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("qwen3_next", ["q_proj", "down_proj"], {"q_proj", "shared_expert.down_proj"}),
        ("deepseek_v3", ["gate_proj"], {"mlp.gate_proj", "shared_experts.gate_proj"}),
        (
            "deepseek_v3",
            r".*\.(o_proj|up_proj)",
            {"o_proj", "mlp.up_proj", "shared_experts.up_proj"},
        ),
        ("qwen2_moe", ["shared_expert_gate"], {"shared_expert_gate"}),
    ],
)
def test_lists_and_patterns_name_dense_and_shared_layers(family, name, targets, expected):
    source = family(name)
    model = on_meta(source, target_modules=targets)
    layers = adapted(model)
    assert all(any(layer.endswith(end) for end in expected) for layer in layers)
    assert all(any(layer.endswith(end) for layer in layers) for end in expected)
    assert adapted_by_plain_peft(source, adapters.settings(model)) == layers


def targets(*names, **changes):
    return {"target_modules": list(names), **changes}


HEAD = "embeddings and the output head"
FUSED = "fused Mamba kernels"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", targets("qproj"), "matches no layer of this model.*did you mean 'q_proj'"),
        ("qwen2", {"target_modules": "q_proj"}, r"whole names.*model\.target_modules=\[q_proj\]"),
        ("qwen2", {"target_modules": "("}, "not a regular expression"),
        ("qwen2", targets("norm"), "'model.norm' cannot be adapted: it is not a linear layer"),
        ("qwen2", targets("lm_head"), HEAD),
        ("qwen2", targets("embed_tokens"), HEAD),
        ("qwen3_moe", targets("gate_proj"), "matches no layer.*\n.*experts.gate_up_proj"),
        ("mamba2", targets("in_proj", "out_proj"), FUSED),
        ("mamba2", targets("conv1d"), FUSED),
        ("deepseek_v4", targets("o_a_proj"), "not one matrix product"),
        ("qwen3_moe", targets("experts.down_proj"), "selects only experts"),
        (
            "qwen3_moe",
            targets("o_proj", "experts.down_proj", lora_dropout=0.1),
            "do not support dropout",
        ),
        ("qwen2", {"modules_to_save": ["norm"]}, r"'norm' is neither(.|\n)*embed_tokens, lm_head"),
        ("qwen2", {"lora_rank": 0, "freeze": ["layers.7"]}, "matches 'layers.7'"),
        ("qwen2", {"lora_rank": 0, "freeze": ["."]}, "freezes every parameter"),
    ],
)
def test_what_cannot_be_trained_is_refused(family, name, changes, message):
    with pytest.raises(ConfigError, match=message):
        on_meta(family(name), **changes)


def exported(source, path, **changes):
    """An adapter as the trainer writes one, that adds something."""
    model = on_meta(source, partial_pretrain=source.path, lora_rank=3, **changes)
    torch.manual_seed(5)
    tensors = {
        peft_name(n, source.places): 0.05 * torch.randn(p.shape)
        for n, p in model.named_parameters()
        if ".lora_" in n
    }
    path.mkdir()
    save_file(tensors, path / ADAPTER_WEIGHTS)
    (path / ADAPTER_CONFIG).write_text(json.dumps(adapters.settings(model), default=str))
    return str(path)


@pytest.mark.parametrize("name", ["deepseek_v3", "mamba2"])
def test_mixtures_and_mamba_train_as_in_a_plain_loop_with_peft(family, tmp_path, name):
    # with larger weights a router's choice may turn on the last bit
    source = family(name, initializer_range=0.05)
    adapter = exported(source, tmp_path / "adapter")
    assert_as_plain(source, adapter, {**ON_ONE_RANK, 2: MICRO_BATCHES})


def test_an_adapter_of_another_part_is_refused(tmp_path):
    source = write_whole_model(tmp_path / "model", "mistral3")
    whole = AutoModelForMultimodalLM.from_pretrained(source.path, dtype=torch.float32)
    adapter = write_adapter(whole, tmp_path / "adapter", target_modules=r".*\.q_proj")
    with pytest.raises(
        ConfigError,
        match=r"adapts .*vision_tower.*q_proj.*, but only the language model is trained",
    ):
        on_meta(source, lora_rank=0, lora_adapter_path=adapter)


def test_adapters_that_the_model_has_no_place_for_are_not_dropped(family):
    source = family("qwen2_moe")
    model = on_meta(source)
    wider = on_meta(source, target_modules=["q_proj", "shared_expert_gate"])
    saved = {name: parameter for name, parameter in wider.named_parameters() if ".lora_" in name}
    with pytest.raises(
        ConfigError, match=r"does not train: .*shared_expert_gate.lora_A.*4 in total"
    ):
        ModelShards(model).load_state_dict(Shards(Path("global_step_2"), [saved]))


@pytest.mark.parametrize("word", ["model.freeze=[norm]", "model.new_tokens=[new]"])
def test_keys_that_do_not_work_with_lora(word):
    with pytest.raises(ConfigError, match="does not work with LoRA"):
        load_config(["model.lora_rank=8", "model.partial_pretrain=x", word])


@pytest.mark.parametrize(("changes", "scale"), [({}, 6 / 4), ({"use_rslora": True}, 6 / 2)])
def test_adapters_are_scaled_as_configured(source, changes, scale):
    model = on_meta(source, lora_rank=4, lora_alpha=6, **changes)
    adapted_layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert adapted_layers and all([*layer.scaling.values()] == [scale] for layer in adapted_layers)
    assert adapters.settings(model)["lora_alpha"] == 6


def losses_with_dropout(world, model, adapter):
    """{(dropout, in training): loss} of the same documents."""
    losses = {}
    for dropout in (0.0, 0.3):
        built = build_toy_model(world, model, lora_adapter_path=adapter, lora_dropout=dropout)
        for is_training in (True, False):
            built.train(is_training)
            with torch.no_grad():
                found = built(pack(ToySamples(4), range(4))).loss_sum
            losses[dropout, is_training] = float(found)
    return losses


def test_dropout_is_drawn_in_training_alone(tmp_path):
    """distributed/test_fit.py covers the seed, which depends on step and rank."""
    model = write_model_config(tmp_path / "model")
    adapter = write_adapter(plain_model(model.path), tmp_path / "adapter", lora_dropout=0.5)
    (found,) = run_ranks(losses_with_dropout, 1, model, adapter)
    assert found[0.3, False] == found[0.0, False] == found[0.0, True] != found[0.3, True]


@pytest.mark.parametrize(("name", "written"), [("llama", 0.1), ("deepseek_v3", 0.0)])
def test_dropout_is_written_where_peft_can_load_it(family, name, written):
    source = family(name)
    settings = adapters.settings(on_meta(source, lora_dropout=0.1))
    assert settings["lora_dropout"] == written
    assert adapted_by_plain_peft(source, settings)


def test_experts_train_as_in_a_plain_loop_with_peft(family, tmp_path):
    """The plain loop uses peft's `target_parameters`. gpt_oss has transposed weights and biases."""
    source = family("gpt_oss", initializer_range=0.05)
    adapter = write_adapter(
        plain_model(source.path),
        tmp_path / "adapter",
        target_modules=["o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        lora_alpha=1,
    )
    assert_as_plain(source, adapter, {1: {"one rank": {}}, 2: MICRO_BATCHES | RECOMPUTED})


def test_the_text_part_of_several_trains_its_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_training, "AutoModelForCausalLM", AutoModelForMultimodalLM)
    source = write_whole_model(tmp_path / "model", "qwen3_5_moe")
    targets = ["o_proj", "experts.gate_up_proj", "experts.down_proj"]
    model = on_meta(source, lora_rank=3, lora_alpha=1, target_modules=targets)
    assert "experts.down_proj (2), experts.gate_up_proj (2)" in lora_layers.summary(model, rank=3)
    adapter = exported(source, tmp_path / "adapter", lora_alpha=1, target_modules=targets)
    assert_as_plain(source, adapter, {1: {"one rank": {}}, 2: MICRO_BATCHES})
