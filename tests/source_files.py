"""Two small sources for tests: chats, and questions with answers, which have a separate chat
template.
"""

import pytest
from small_files import write_lines

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' says ' + m.content + '<|im_end|>' }}{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>assistant says {% endif %}"
)
NUM_CHATS = 12
NUM_ANSWERS = 8


def write_sources(directory):
    chats = [[("user", f"Add {n} to x."), ("assistant", f"x + {n}")] for n in range(NUM_CHATS)]
    for n, chat in enumerate(chats):
        chat += [("user", "And y?"), ("assistant", f"x + {n} + y")] if n % 3 != 2 else []
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats
    ]
    answers = [
        {"q": f"What is {n}?", "a": f"{n} it is, and no other number"} for n in range(NUM_ANSWERS)
    ]
    for name, found in (("chats", rows), ("answers", answers)):
        write_lines(directory / f"{name}.jsonl", found)
    (directory / "says.jinja").write_text(TEMPLATE)


@pytest.fixture
def files(tmp_path):
    write_sources(tmp_path)
    return tmp_path


def chats(directory, more=""):
    """An entry of a list of sources; `more` keys begin with a comma."""
    return f"{{files:{directory}/chats.jsonl{more}}}"


def answers(directory, more=""):
    return f"{{files:{directory}/answers.jsonl,prompt_key:q,response_key:a,chat_template:{directory}/says.jinja{more}}}"


def words(directory, *entries, key="train_files"):
    return [
        f"data.{key}=[{','.join(entries)}]",
        f"data.cache_dir={directory}/cache",
        "data.max_length=64",
    ]
