"""Promise 4: an export made later from the shards of a checkpoint equals the export of its save, or
does not exist.
"""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from exports import tensors_in
from ranks import run_ranks
from small_files import change_json, flip
from toy import (
    ToySamples,
    build_toy_model,
    differing,
    full_parameters,
    toy_run,
    write_model_config,
)
from toy_runs import Recipe, checkpoint_manager, run, save_now

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.offline_export import export_from_shards
from trainer.cli import checkpoint as cli
from trainer.config import ConfigError
from trainer.errors import CannotWriteError

COMPANIONS = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}


@pytest.fixture(scope="module")
def source(root):
    # rows that no world size divides
    source = write_model_config(
        root / "model", vocab_size=163, intermediate_size=97, dtype="float32"
    )
    Path(source.path, "tokenizer.json").write_text('{"ä": 1}')
    Path(source.path, "chat_template.jinja").write_text("{{ messages }}")
    return source


@pytest.fixture(scope="module")
def trained(source, root):
    """{case: (run directory, result of rank 0)}; each has checkpoints of steps 1 and 2."""
    recipe = Recipe(total_steps=2, save_freq=1)
    plain = run_ranks(run, 2, root / "plain", source, recipe)[0]
    hsdp = run_ranks(run, 4, root / "hsdp", source, recipe, fsdp_size=2)[0]
    return {"plain": (root / "plain", plain), "hsdp": (root / "hsdp", hsdp)}


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy that a test may break, of two ranks."""
    return Path(
        shutil.copytree(trained["plain"][0] / "global_step_2", tmp_path / "run" / "global_step_2")
    )


def exported(checkpoint, target, dtype="float32"):
    export_from_shards(checkpoint, target, dtype=dtype)
    return tensors_in(target)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("case", ["plain", "hsdp"])
def test_an_export_afterwards_is_the_export_of_the_save_to_the_byte(trained, tmp_path, case):
    run_dir, result = trained[case]
    manifest = layout.inspect(run_dir / "global_step_2").manifest
    assert manifest.mesh == ({"fsdp": 2} if case == "plain" else {"ddp": 2, "fsdp": 2})
    tensors = exported(run_dir / "global_step_2", tmp_path / "export")
    assert contents(tmp_path / "export") == contents(run_dir / "global_step_2" / "huggingface")
    assert set(contents(tmp_path / "export")) == {"model.safetensors", *COMPANIONS}
    assert os.listdir(tmp_path) == ["export"]
    assert not differing(tensors, result.parameters)


def save_once(world, run_dir, source, largest):
    """A checkpoint of step 0 without training, with one parameter set to `largest`; all
    parameters, whole.
    """
    run_dir.mkdir(exist_ok=True)
    model = build_toy_model(world, source)
    if largest is not None:
        model.model.norm.weight.to_local().data.fill_(largest)
    parts = toy_run(world, model, ToySamples(), total_steps=6)
    save_now(checkpoint_manager(world, run_dir, source, parts, Recipe()), parts)
    return full_parameters(model)


@pytest.mark.parametrize(
    "name", [layout.model_file(2, 1), layout.extra_file(2, 0), "huggingface/tokenizer.json"]
)
def test_a_damaged_file_is_refused_and_named_and_nothing_appears(checkpoint, tmp_path, name):
    flip(checkpoint / name)
    with pytest.raises(ConfigError, match=f"is damaged: {name} changed after it was written"):
        exported(checkpoint, tmp_path / "export")
    assert os.listdir(tmp_path) == ["run"]


def test_damage_to_what_an_export_does_not_read_is_no_obstacle(trained, tmp_path):
    """Damage the earlier exported weights, the optimizer, and the second replica. The first above
    all is a reason to export again.
    """
    run_dir, result = trained["hsdp"]
    broken = Path(shutil.copytree(run_dir / "global_step_2", tmp_path / "run" / "global_step_2"))
    for name in (
        "huggingface/model.safetensors",
        layout.optim_file(4, 0),
        layout.model_file(4, 2),
        "data.pt",
    ):
        flip(broken / name)
    assert not differing(exported(broken, tmp_path / "export"), result.parameters)


def test_a_run_that_rotates_the_checkpoint_away_meanwhile(trained, checkpoint, tmp_path):
    def rotate(operation):
        if operation.path.name == "model.safetensors" and operation.kind == "create":
            shutil.rmtree(checkpoint)

    with patch.object(fsio, "observer", rotate):
        tensors = exported(checkpoint, tmp_path / "export")
    assert not checkpoint.exists() and not differing(tensors, trained["plain"][1].parameters)


def test_a_target_that_cannot_be_taken_is_refused(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "link", "empty"):
        with pytest.raises(ConfigError, match=f"{name}' already exists"):
            exported(checkpoint, tmp_path / name)
    with pytest.raises(ConfigError, match=r"there is no directory '.*/missing'"):
        exported(checkpoint, tmp_path / "missing" / "export")
    (tmp_path / "alias").symlink_to(checkpoint)
    inside = tmp_path / "alias" / "huggingface" / "export"
    with pytest.raises(ConfigError, match="is inside the checkpoint and would be deleted with it"):
        exported(checkpoint, inside)
    assert set(os.listdir(tmp_path)) == {"alias", "empty", "file", "link", "run"}


def test_a_full_disk_leaves_nothing(checkpoint, tmp_path):
    def fill(operation):
        if operation.kind == "write" and operation.path.name == "model.safetensors":
            raise OSError(28, "No space left on device", str(operation.path))

    with (
        patch.object(fsio, "observer", fill),
        pytest.raises(CannotWriteError, match=r"export' cannot be created: .*No space"),
    ):
        exported(checkpoint, tmp_path / "export")
    assert os.listdir(tmp_path) == ["run"]


def test_killed_at_any_operation_there_is_no_half_export(checkpoint, tmp_path):
    """One rename gives a directory its name, once all that it holds is written and synced."""
    operations = []
    target = tmp_path / "export"
    with patch.object(fsio, "observer", operations.append):
        exported(checkpoint, target)
    renamed = next(n for n, operation in enumerate(operations) if operation.target == target)
    staging = operations[renamed].path
    assert re.fullmatch(r"\.export\.[0-9a-f]{8}\.tmp", staging.name)
    before = operations[:renamed]
    paths = {kind: [o.path for o in before if o.kind == kind] for kind in ("create", "fsync")}
    assert len(paths["create"]) == 5 and paths["create"] == paths["fsync"]
    assert all(o.path.is_relative_to(staging) for o in before if o.kind != "fsync_dir")
    after = [(operation.kind, operation.path) for operation in operations[renamed + 1 :]]
    assert (before[-1].kind, before[-1].path) == ("fsync_dir", staging)
    assert after == [("fsync_dir", tmp_path)]


@pytest.mark.parametrize("asked", [{"lora": "merged"}, {"lora": "adapter"}, {"base": Path("x")}])
def test_options_of_adapters_are_refused_for_a_whole_model(checkpoint, tmp_path, asked):
    """These options were accepted without an effect."""
    with pytest.raises(ConfigError, match="not adapters"):
        export_from_shards(checkpoint, tmp_path / "export", dtype="float32", **asked)
    assert os.listdir(tmp_path) == ["run"]


def test_values_beyond_float16_are_refused(source, tmp_path):
    run_ranks(save_once, 1, tmp_path / "run", source, 7e4)
    with pytest.raises(
        ConfigError, match=r"'model\.norm\.weight' has values beyond the range of float16"
    ):
        export_from_shards(tmp_path / "run" / "global_step_0", tmp_path / "export", dtype="float16")
    tensors = exported(tmp_path / "run" / "global_step_0", tmp_path / "export", "bfloat16")
    assert tensors["model.norm.weight"].isfinite().all()


def test_code_of_a_model_is_taken_along_and_never_run(source, tmp_path):
    own = Path(shutil.copytree(source.path, tmp_path / "model"))
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change_json(own / "config.json", auto_map=code)
    (own / "own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    whole = run_ranks(save_once, 2, tmp_path / "run", replace(source, path=str(own)), None)[0]
    assert not differing(exported(tmp_path / "run" / "global_step_0", tmp_path / "export"), whole)
    assert (tmp_path / "export" / "own.py").exists()
    assert not (tmp_path / "canary").exists()


def test_the_command_exports_what_a_resume_takes(trained, tmp_path, capsys):
    run_dir = Path(shutil.copytree(trained["plain"][0], tmp_path / "run"))
    (run_dir / layout.POINTER).write_text("1")
    assert cli.main(["export", str(run_dir), str(tmp_path / "export")]) == 0
    assert "was moved back to global_step_1" in capsys.readouterr().out
    saved = tensors_in(run_dir / "global_step_1" / "huggingface")
    rounded = {name: tensor.bfloat16() for name, tensor in saved.items()}
    assert not differing(tensors_in(tmp_path / "export"), rounded)
    words = ["export", str(run_dir), str(tmp_path / "wide"), "--dtype", "float32"]
    assert cli.main(words) == 0 and not differing(tensors_in(tmp_path / "wide"), saved)
    assert cli.main(words) == 2 and "already exists" in capsys.readouterr().err
