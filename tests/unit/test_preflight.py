"""The launcher finds errors before it starts a rank, within seconds and without torch."""

from processes import run_python
from small_files import write_json

TRY_ALL = """
import sys
from trainer.launch import __main__ as launch

launch.supervise = lambda *args, **kwargs: 99  # a run that would start
sys.modules["alembic"] = None  # is not installed
for line in sys.stdin.read().splitlines():
    code = launch.main(["2", *line.split("\\t")])
    print(code, flush=True)
    print(f"-- {code}", file=sys.stderr, flush=True)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
MODEL = {"config.json": '{"model_type": "qwen2"}', "tokenizer.json": "{}", "model.safetensors": ""}


def write_model(directory, **changes):
    """Files with the names of a model's files. `config_json=None` omits that file."""
    directory.mkdir(exist_ok=True)
    files = MODEL | {key.replace("_", "."): text for key, text in changes.items()}
    for name, text in files.items():
        if text is not None:
            (directory / name).write_text(text)
    return directory


MISTAKES = {  # overrides, separated by tabs: exit code, and a part of the message
    "data.train_files=nope.jsonl": (65, "'nope.jsonl'"),
    "data.train_files=empty.jsonl": (65, "'empty.jsonl'"),
    "data.train_files=[{files:rows.jsonl,chat_template:nope.jinja}]": (2, "nope.jinja"),
    "data.chat_template=nope.jinja": (2, "data.chat_template=nope.jinja: No such file"),
    "data.chat_template=blank.jinja": (2, "data.chat_template=blank.jinja: the file is empty"),
    "model.partial_pretrain=./nope": (2, "model.partial_pretrain=./nope"),
    "model.partial_pretrain=rows.csv": (2, "rows.csv is a file"),
    "model.partial_pretrain=no-config": (2, "no-config has no config.json"),
    "model.partial_pretrain=no-tokenizer": (2, "no-tokenizer has no tokenizer"),
    "model.partial_pretrain=no-weights": (2, "no-weights has no weights"),
    "model.partial_pretrain=half": (2, "b.safetensors"),
    "model.partial_pretrain=some/model": (
        2,
        "run `hf download some/model` on a machine with internet access",
    ),
    "--experiment=gsm8k": (2, "is not of the form key=value"),
    "learning_rate=1e-5": (2, "docs/coming_from.md"),
    "trainer.logger=mlflow": (2, "'alembic>=1.13'"),
    "trainer.guard.rules=[{metric: train/los, above: 3}]": (2, "did you mean 'train/loss'"),
    "trainer.resume_mode=resume_path\ttrainer.resume_from_path=gone/global_step_4": (
        2,
        "trainer.resume_from_path=gone/global_step_4",
    ),
    "trainer.default_local_dir=old\ttrainer.resume_mode=resume_path\t"
    "trainer.resume_from_path=old/global_step_3": (2, "each restart of the command would go back"),
    "trainer.default_local_dir=other": (2, "'theirs'"),
    "trainer.default_local_dir=unmounted": (73, "it links to '/no/disk', which does not exist"),
    "experiment=~no-one/a.yaml": (2, "experiment=~no-one/a.yaml: there is no such file"),
    "trainer.resume_mode=disable\ttrainer.default_local_dir=old": (2, "up to step 3"),
    "data.train_files=rows.jsonl\tmodel.partial_pretrain=whole": (99, ""),
    "model.partial_pretrain=no-weights\tmodel.random_weights=true": (99, ""),
}


def test_mistakes_are_found_before_a_rank_starts_and_torch_is_imported(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jinja").write_text(" \n")
    (tmp_path / "old" / "global_step_3").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "unmounted").symlink_to("/no/disk")
    (tmp_path / "other" / "run.json").write_text(
        '{"project_name": "p", "experiment_name": "theirs"}'
    )
    write_model(tmp_path / "whole")
    write_model(tmp_path / "no-config", config_json=None)
    write_model(tmp_path / "no-tokenizer", tokenizer_json=None)
    write_model(tmp_path / "no-weights", model_safetensors=None)
    half = write_model(tmp_path / "half", model_safetensors=None)
    (half / "a.safetensors").touch()
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    write_json(half / "model.safetensors.index.json", index)
    done = run_python("-c", TRY_ALL, input="\n".join(MISTAKES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    messages = done.stderr.split("-- ")
    assert len(codes) == len(MISTAKES)
    for (word, (code, part)), found_code, message in zip(
        MISTAKES.items(), codes, messages, strict=False
    ):
        assert int(found_code) == code and part in message, (word, message)
        assert len(message.splitlines()) <= 3, message
