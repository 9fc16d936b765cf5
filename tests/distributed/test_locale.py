"""A run in a Latin-1 locale trains the same tokens as in a UTF-8 locale, and prints without a
traceback.
"""

import os
import shutil
import subprocess
import sys

import pytest
from whole_runs import curve, tiny_model, train

LATIN_1 = "en_US.ISO-8859-1"
SMALL = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ '｜' + message['role'] + '｜→' + message['content'] "
    "}}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{{ '｜assistant｜→' }}{% "
    "endif %}"
)


@pytest.fixture(scope="module")
def locales(root):
    """A directory with a Latin-1 locale, for LOCPATH."""
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed")
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", root / LATIN_1], capture_output=True
    )
    if not (root / LATIN_1).is_dir():
        pytest.skip(f"no Latin-1 locale can be made here: {made.stderr.decode(errors='replace')}")
    return root


def test_a_latin_1_locale_trains_the_same_tokens(tmp_path, locales):
    root = tmp_path / "root"
    root.mkdir()
    (root / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    words = (*tiny_model(root), *SMALL, f"data.chat_template={root}/template.jinja")
    train(tmp_path / "utf8", 1, *words)
    own = (f"trainer.default_local_dir={tmp_path}/latin1", f"data.cache_dir={tmp_path}/cache")
    env = os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": LATIN_1, "LOCPATH": str(locales)}
    command = [sys.executable, "-m", "trainer", *words, *own]
    done = subprocess.run(command, env=env, capture_output=True, timeout=240)
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0 and "Traceback" not in output, output
    assert "\\uff5c" in output, "the template's own character cannot be shown in Latin-1"
    run_dirs = [tmp_path / name for name in ("utf8", "latin1")]
    losses = [curve(run_dir) for run_dir in run_dirs]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    for run_dir in run_dirs:
        template = run_dir / "global_step_2" / "huggingface" / "chat_template.jinja"
        assert template.read_text(encoding="utf-8") == TEMPLATE
