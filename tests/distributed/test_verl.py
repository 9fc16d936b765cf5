"""A run begun in verl with FSDP2 continues here on any number of ranks: parameters, moments, step and position."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interop.verl_files import expected_tensors, load_checkpoint, write_run
from interop.verl_run import Settings
from ranks import run_ranks
from toy import write_model_config
from toy_runs import Recipe, run

from trainer.checkpoint import layout, verl
from trainer.progress import Position


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # rows that no world size divides
    return write_model_config(tmp_path_factory.mktemp("model"), vocab_size=163, intermediate_size=97)


@pytest.fixture(scope="module")
def run_dir(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, 22 samples in batches of 4: five steps an epoch, two samples left out."""
    path = tmp_path_factory.mktemp("verl") / "run"
    run_ranks(write_run, 2, path, Path(source.path), Settings((5, 7)))
    return path


def require_equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_everything_comes_back_bit_equal(source: Any, run_dir: Path, world_size: int) -> None:
    whole, steps, position = run_ranks(load_checkpoint, world_size, run_dir / "global_step_7", source)[0]
    require_equal(whole, expected_tensors(run_dir))
    assert set(steps.values()) == {7.0}
    assert position == Position(step=7, epoch=1, samples_consumed=8)


@pytest.mark.parametrize("fsdp_size", [1, 2])
def test_replicas_are_read_once(source: Any, tmp_path: Path, fsdp_size: int) -> None:
    run_ranks(write_run, 4, tmp_path / "run", Path(source.path), Settings((3,)), fsdp_size=fsdp_size)
    checkpoint = layout.inspect(tmp_path / "run" / "global_step_3").verl
    assert (checkpoint.world_size, verl.count_shards(checkpoint)) == (4, fsdp_size)
    whole, _, position = run_ranks(load_checkpoint, 3, checkpoint.path, source)[0]
    require_equal(whole, expected_tensors(tmp_path / "run"))
    assert position == Position(3, 0, 12)


def test_an_untied_head_has_its_own_number(tmp_path: Path) -> None:
    source = write_model_config(tmp_path / "model", tie_word_embeddings=False, vocab_size=163)
    run_ranks(write_run, 2, tmp_path / "run", Path(source.path), Settings((2,)))
    whole, _, _ = run_ranks(load_checkpoint, 1, tmp_path / "run" / "global_step_2", source)[0]
    require_equal(whole, expected_tensors(tmp_path / "run"))


def test_shards_written_on_gpus_load_without_one(source: Any, tmp_path: Path) -> None:
    run_ranks(write_run, 2, tmp_path / "run", Path(source.path), Settings((2,)), device="cuda")
    path = tmp_path / "run" / "global_step_2"
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path / "model_world_size_2_rank_0.pt", weights_only=True)
    whole, _, _ = run_ranks(load_checkpoint, 2, path, source)[0]
    require_equal(whole, expected_tensors(tmp_path / "run"))


def test_the_moments_have_the_form_of_our_own(source: Any, run_dir: Path) -> None:
    names = [name for name in expected_tensors(run_dir) if not name.endswith(("exp_avg", "exp_avg_sq"))]
    checkpoint = layout.inspect(run_dir / "global_step_7").verl
    parts = verl.optimizer_parts(checkpoint, num_shards=2, param_names=sorted(names))
    for part in parts:
        assert set(part) == {"state", "param_groups"}
        assert set(part["state"]) == set(names)
        (group,) = part["param_groups"]
        assert set(group["param_names"]) == set(names) and "params" not in group
        assert group["lr"] == pytest.approx(3e-3) and group["weight_decay"] == 0.01


def test_another_model_is_refused_by_name(source: Any, run_dir: Path, tmp_path: Path) -> None:
    other = write_model_config(tmp_path, vocab_size=163, intermediate_size=97, num_hidden_layers=3)
    with pytest.raises(AssertionError, match=r"no tensor 'model\.layers\.2\."):
        run_ranks(load_checkpoint, 1, run_dir / "global_step_7", other)
    wide = write_model_config(tmp_path, vocab_size=163, intermediate_size=98)
    with pytest.raises(AssertionError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight' was saved as \(97, 64\)"):
        run_ranks(load_checkpoint, 1, run_dir / "global_step_7", wide)


def test_a_run_of_verl_goes_on_and_ends_as_ours(source: Any, tmp_path: Path) -> None:
    """24 samples in batches of 8: three steps an epoch; verl saved after four, ours trains the last two of six."""
    run_ranks(write_run, 2, tmp_path / "run", Path(source.path), Settings((4,), num_samples=24, batch_size=8))
    result = run_ranks(run, 3, tmp_path / "run", source, Recipe())[0]
    expected = expected_tensors(tmp_path / "run")
    require_equal(result.loaded, {name: expected[name] for name in result.loaded})
    assert (result.start_step, sorted(result.losses), result.exit_code) == (4, [5, 6], 0)
    again = run_ranks(run, 2, tmp_path / "run", source, Recipe(total_steps=7))[0]
    assert again.start_step == 6, "continued from our own checkpoint by now"
    require_equal(again.loaded, result.parameters)
    assert layout.inspect(tmp_path / "run" / "global_step_4").verl.step == 4, "verl's is left as it was"
