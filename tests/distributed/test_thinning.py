"""`keep_full` on ranks, with copies of the parameters and saves behind training: what is left serves and starts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from safetensors.torch import load_file
from toy import ToySamples, build_toy_model, full_parameters, toy_run, write_model_config
from toy_runs import Recipe, checkpoint_manager, run

from trainer.checkpoint import layout
from trainer.checkpoint.offline_export import export_from_shards
from trainer.checkpoint_tools.listing import prove
from trainer.runtime.files import tree_bytes

RECIPE = Recipe(total_steps=4, save_freq=1, keep_full=2, async_save=True)


def weights_of(world: Any, path: Path, source: Any) -> dict[str, torch.Tensor]:
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=4)
    manager = checkpoint_manager(world, path.parent.parent / "elsewhere", source, parts, Recipe())
    manager.load(layout.inspect(path), contents=["model"])
    return full_parameters(parts.model)


def test_thinned_replicas_serve_and_start_and_the_whole_ones_resume_bit_equal(tmp_path: Path) -> None:
    source = write_model_config(tmp_path / "model", vocab_size=163, intermediate_size=97, dtype="float32")
    run_dir = tmp_path / "run"
    straight = run_ranks(run, 4, run_dir, source, RECIPE, fsdp_size=2)[0]
    old, whole = run_dir / "global_step_1", run_dir / "global_step_3"
    assert [info.thinned for info in layout.committed(run_dir)] == [True, True, False, False]
    assert not list(old.glob("optim*")) and len(list(whole.glob("optim*"))) == 4
    assert tree_bytes(old) < 0.6 * tree_bytes(whole) and prove(old) == []

    export_from_shards(old, tmp_path / "export", dtype="float32")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    saved = load_file(old / "huggingface" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    loaded = run_ranks(weights_of, 2, old, source)[0]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in exported.items())

    shutil.rmtree(run_dir / "global_step_4")
    again = run_ranks(run, 4, run_dir, source, replace(RECIPE, keep_full=1), fsdp_size=2)[0]
    assert again.start_step == 3 and all(torch.equal(again.parameters[k], v) for k, v in straight.parameters.items())
    assert [info.thinned for info in layout.committed(run_dir)] == [True, True, True, False]
