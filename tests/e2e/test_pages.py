"""Every command block of README.md and docs/ is executed, or says on the page what it needs that CI
lacks.

As it stands on the page, from a directory that has the files of which the page speaks, with these
differences: a run has two ranks at most, which are forked instead of started; behind its words
stand those of a tiny run (`tiny_model`, two steps, at most 8 tokens an answer) where the page does
not set the key; README's first run is the run directory of all pages, and its export the model that
they name.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import whole_runs
from page_commands import NEEDS, OURS, PAGES, blocks_of, commands_in
from small_files import write_lines

from trainer import api
from trainer.cli import __main__ as commands
from trainer.launch import __main__ as launch
from trainer.tracking import Tracking
from trainer.train.start.compose import load_config

LACKING = {"8 GPUs", "the network", "vLLM", "a server", "a browser", "an account"}
"""What CI lacks. A page names it in a comment after the command, as `[needs …]`."""
ELSEWHERE = ("bash run_tests.sh", "bash run_sft.sh doctor 2 --run")
"""Commands that take minutes; test_run_scripts.py and test_doctor_run.py run them."""
RUN = Path("checkpoints/sft/quickstart")
STEPS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "trainer.logger=[console]",
    "model.compile=false",
)
"""Compiling takes minutes; numerics/test_parallelize.py does it."""
MEANT = {
    "Qwen/Qwen2.5-0.5B-Instruct": "model",
    "partial_pretrain=DIR": "partial_pretrain=model",
    "MODEL": "model",
    "RUN_DIR": str(RUN),
    "global_step_N": "global_step_2",
    "--attach 500": "--attach 2",
    "/data/phase1/": "data/",
}
"""Replacements for the placeholders on the pages."""
SAVED_FILE = re.compile(r"Save this as `(.*?)`:\n\n```\w+\n(.*?)^```", re.M | re.S)
TAKE_KEYS = ("train", "plan", "doctor", "data preview", "data stats")
CHATS = [
    [{"role": "user", "content": f"{n} plus 1?"}, {"role": "assistant", "content": str(n + 1)}]
    for n in range(40)
]


class Reader:
    """Executes the pages in a separate directory."""

    def __init__(self, root):
        self.root = root
        self.tiny = [*whole_runs.tiny_model(root), *STEPS]
        self.num_runs = 0
        self.write_files()

    def write_files(self):
        rows = [{"messages": messages} for messages in CHATS]
        files = {
            "chats.jsonl": rows,
            "data/chats.jsonl": rows,
            "tasks.jsonl": [{"prompt": "Write f.", "tests": "assert f"}],
            "mine.yaml": ["trainer: {experiment_name: mine}"],
            "conf/experiment/mine.yaml": ["trainer: {experiment_name: also_mine}"],
        }
        for name, lines in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            write_lines(self.root / name, lines)
        pq.write_table(pa.Table.from_pylist(rows), self.root / "data/chats.parquet")

    def words_behind(self, words):
        """Return the overrides of a tiny run, except for keys that the command sets itself."""
        keys = {word.partition("=")[0] for word in words}
        return [word for word in self.tiny if word.partition("=")[0] not in keys]

    def with_own_names(self, text):
        for placeholder, name in (MEANT | {"s3://": f"file://{self.root}/"}).items():
            text = text.replace(placeholder, name)
        return text

    def execute(self, command):
        """Raise an error for a failed command."""
        words = shlex.split(self.with_own_names(command), comments=True)
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            while re.match(r"[A-Z_]+=", words[0]):
                patch.setenv(*words.pop(0).split("=", 1))
            if words[:2] == ["python", "-c"]:
                patch.setattr(sys, "argv", ["-c", *words[3:]])
                exec(compile(words[2], command, "exec"), {})
            else:
                assert re.match(OURS, " ".join(words)), "nothing executes it"
                code = self._run(words[1 if words[0] == "fsdp-sft" else 2 :], patch)
                assert code == 0, f"exit code {code}\n{said.getvalue()}"

    def _run(self, words, patch):
        has_name = not words[0].isdecimal() and words[0] in commands.COMMANDS
        name = " ".join(words[: 2 if words[0] == "data" else 1]) if has_name else "train"
        rest = words[len(name.split()) :] if has_name else words
        if name in TAKE_KEYS:
            rest = [*rest, *self.words_behind(rest)]
        if name == "evaluate" and "--attach" not in rest:
            rest = [*rest, "--max-new-tokens=8"]
        if name != "train":
            return commands.main([*name.split(), *rest])
        patch.setattr(launch, "supervise", self._on_forked_ranks)
        patch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
        rest = [str(min(2, int(word))) if word.isdecimal() else word for word in rest]
        names = ("experiment=", "trainer.experiment_name=")
        if self.num_runs and not any(word.startswith(names) for word in rest):  # of another page
            rest.append(f"trainer.experiment_name=run_{self.num_runs}")
        self.num_runs += 1
        return launch.main(rest)

    def _on_forked_ranks(self, command, **_):
        (number,) = (word for word in command if word.startswith("--nproc-per-node="))
        words = command[command.index("trainer") + 1 :]
        code, output = self._forked(int(number.partition("=")[2]), *words)
        print(output)
        return 1 if code is None else code

    def _forked(self, num_ranks, *words):
        here = functools.partial(os.chdir, self.root)
        return whole_runs.run(num_ranks, *words, log=self.root / "log", before=here)

    def train(self, *words, **_):
        """In place of `trainer.api.train`, which starts a process."""
        words = (*words, *self.words_behind(list(words)), "trainer.experiment_name=from_python")
        code, output = self._forked(1, *words)
        assert code == 0, output
        return api.RunDirectory(Path(load_config(list(words)).trainer.default_local_dir))


@pytest.fixture(scope="module")
def reader(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        reader = Reader(root)
        reader.execute("bash run_sft.sh 2")
        shutil.copytree(RUN / "global_step_2/huggingface", "model", dirs_exist_ok=True)
        reader.tiny.remove("model.random_weights=true")
        for name in ("a", "b"):
            shutil.copytree(RUN, RUN.parent / name)
        yield reader


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_page_is_executed_or_says_what_it_needs(page, reader):
    reader.write_files()
    text = page.read_text()
    for name, content in SAVED_FILE.findall(text):
        (reader.root / name).write_text(reader.with_own_names(content))
    blocks = blocks_of(text, "bash")
    for command in (command for block in blocks for command in commands_in(block)):
        if (needs := NEEDS.search(command)) is not None:
            assert needs[1] in LACKING, command
        elif not command.startswith(ELSEWHERE):
            try:
                reader.execute(command)
            except BaseException as error:
                raise AssertionError(f"{page.name}: {command}") from error


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks_of(page.read_text(), "python")], ids=lambda p: p.stem
)
def test_the_python_of_a_page_runs(page, reader, monkeypatch):
    reader.write_files()
    monkeypatch.setattr(api, "train", reader.train)
    for number, block in enumerate(blocks_of(page.read_text(), "python")):
        tracking = Tracking("pages", f"{page.stem}_{number}", default_backend=["console"])
        exec(compile(block, page.name, "exec"), {"run_dir": RUN, "tracking": tracking})
