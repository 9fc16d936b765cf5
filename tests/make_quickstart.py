"""Train the tokenizer of the quickstart's model: `python tests/make_quickstart.py` writes it into
trainer/quickstart/model. Configuration, chat template and samples are written by hand.
"""

import json
from pathlib import Path

from small_files import read_lines
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trainer.quickstart import MODEL_DIR, TRAIN_FILE

ENGLISH = Path(__file__).with_name("quickstart_english.txt")
CHAT_TEMPLATE = MODEL_DIR / "chat_template.jinja"
VOCAB_SIZE = 4096
MAX_LENGTH = 4096
PAD_TOKEN, START_TOKEN, END_TOKEN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's own pattern: transformers 5 sets it for every model of this type, whatever tokenizer.json
# says.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts):
    """Train a tokenizer with at most `VOCAB_SIZE` entries. Equal texts give equal ids; 0 to 2 are
    the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(directory, tokenizer):
    """Write the files of a Hugging Face tokenizer with the quickstart's chat template.

    transformers does not write them, because version 5 names a class that older readers do not
    know.
    """
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))  # vocab.json and merges.txt
    chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    special_tokens = {
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": [START_TOKEN],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", special_tokens)
    (directory / CHAT_TEMPLATE.name).write_text(chat_template, encoding="utf-8")


def _write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(model_dir):
    """Write the files of the tokenizer."""
    rows = read_lines(TRAIN_FILE)
    texts = [message["content"] for row in rows for message in row["messages"]]
    english = ENGLISH.read_text(encoding="utf-8").splitlines(keepends=True)
    write_tokenizer(model_dir, train_tokenizer([*texts, *english]))


if __name__ == "__main__":
    make(MODEL_DIR)
