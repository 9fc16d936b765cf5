"""`model.new_tokens`: the tokenizer, the weights and the export of a model that learns a new chat
template.
"""

import shutil
import sys

import pytest
import torch
from exports import tensors_in
from ranks import run_ranks
from small_files import read_json
from toy import build_toy_model, differing, whole, write_weights
from toy_runs import begun
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import shrink, tiny_model, train

from trainer.config import ConfigError
from trainer.model import new_tokens
from trainer.model.pretrained import ModelSource
from trainer.quickstart import MODEL_DIR

TURN = "<|turn|>"
OVER = "<|over|>"
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|over|>\n{% "
    "endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def pretrained(target, *, is_tied, **changes):
    """The quickstart's tokenizer with weights of one small layer, rows far from zero on average."""
    shutil.copytree(MODEL_DIR, target)
    shrink(target, hidden_size=32, intermediate_size=48, tie_word_embeddings=is_tied, **changes)
    model = write_weights(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape[-1]) * 0.05)
    model.save_pretrained(target)
    return target


def loaded(world, path, ids):
    source = ModelSource(path, new_tokens=ids)
    model = build_toy_model(world, source)
    return {name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("is_tied", "num_rows"), [(True, 4096), (False, 4096), (True, 4224)], ids=str
)
def test_rows_of_new_tokens_are_near_the_mean_and_equal_on_any_number_of_ranks(
    tmp_path, is_tied, num_rows
):
    """Spare rows of the vocabulary are used first, and their content is overwritten."""
    source = pretrained(tmp_path / "model", is_tied=is_tied, vocab_size=num_rows)
    stored = AutoModelForCausalLM.from_pretrained(source).state_dict()
    path, ids = new_tokens.extended(str(source), [TURN, OVER], tmp_path / "cache")
    first = run_ranks(loaded, 1, path, ids)[0]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = stored[name]
        new = first[name]
        assert len(old) == num_rows and len(new) == {4096: 4160, 4224: 4224}[num_rows]
        made = {*ids.values(), *range(num_rows, len(new))}
        kept = {row for row in range(num_rows) if torch.equal(new[row], old[row])}
        assert kept == set(range(len(new))) - made
        trained = old[: min(made)]
        rows = new[sorted(made)]
        assert float(((rows - trained.mean(0)) / trained.std(0)).abs().max()) < 0.5
        assert len(rows.unique(dim=0)) == len(rows), "no two rows are alike"
    for world_size in (2, 4):
        found = run_ranks(loaded, world_size, path, ids)[0]
        assert differing(found, first) == []


def test_tokens_that_exist_are_named_and_not_added(tmp_path, caplog):
    known = read_json(MODEL_DIR / "tokenizer.json")["added_tokens"][0]["content"]
    path, ids = new_tokens.extended(str(MODEL_DIR), [known, TURN, TURN], tmp_path)
    assert list(ids) == [TURN] and f"already has '{known}'; not added again" in caplog.text
    assert new_tokens.extended(str(MODEL_DIR), [known], tmp_path) == (str(MODEL_DIR), {})
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode(f"a{TURN}b", add_special_tokens=False)[1:-1] == [ids[TURN]]
    assert new_tokens.extended(str(MODEL_DIR), [known, TURN], tmp_path) == (path, ids), "made once"


def test_a_start_that_was_killed_here_blocks_no_later_one(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(new_tokens, "publish", lambda *_: sys.exit())
        new_tokens.extended(str(MODEL_DIR), [TURN], tmp_path)
    path, _ = new_tokens.extended(str(MODEL_DIR), [TURN], tmp_path)
    assert AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(TURN) is not None


def test_a_tokenizer_of_another_kind_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read .*\n.*save_pretrained"):
        new_tokens.extended(str(tmp_path), [TURN], tmp_path)


def test_a_base_model_learns_a_template_and_its_export_has_it(tmp_path):
    """The export loads strictly, each new token is one id, and generation ends at the token that
    ends a turn.

    A run that stops after two of four steps and resumes equals an uninterrupted run bit for bit.
    """
    source = pretrained(tmp_path / "model", is_tied=False)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    own = [
        *tiny_model(tmp_path),
        f"model.partial_pretrain={source}",
        "model.random_weights=false",
        f'model.new_tokens=["{TURN}","{OVER}"]',
        f"data.chat_template={tmp_path / 'template.jinja'}",
        "trainer.total_training_steps=4",
        "trainer.checkpoint.export_dtype=float32",
        "trainer.save_freq=2",
    ]
    whole_run = tmp_path / "whole"
    train(whole_run, 2, *own)
    again = begun(whole_run, tmp_path / "again", 2)
    train(again, 2, *own)
    export, of_again = (run_dir / "global_step_4" / "huggingface" for run_dir in (whole_run, again))
    assert differing(tensors_in(export), tensors_in(of_again)) == []
    model, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in (TURN, OVER)]
    assert [len(each) for each in ids] == [1, 1]
    ends = model.generation_config.eos_token_id
    assert ids[1][0] in (ends if isinstance(ends, list) else [ends])
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert chat["input_ids"][0] == ids[0][0]
