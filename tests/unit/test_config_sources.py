"""A list of sources in `data.train_files` or `data.val_files`: read from words and recipes,
every mistake named.
"""

import pytest

from trainer.config import ConfigError, RowKeys, Source, sources_of
from trainer.train.start.compose import load_config

DEFAULTS = {
    "repeat": 1.0,
    "max_samples": -1,
    "chat_template": None,
}


def sources(*words: str, key: str = "train_files") -> list[Source]:
    return sources_of(load_config(list(words)).data, key)


def expected(name: str, files: str | list[str], **changes: object) -> Source:
    keys = RowKeys(**{key: value for key, value in changes.items() if key not in DEFAULTS})  # type: ignore[arg-type]
    own = {key: changes.get(key, value) for key, value in DEFAULTS.items()}
    return Source(name=name, files=files, keys=keys, **own)  # type: ignore[arg-type]


def test_paths_globs_and_lists_of_them_are_one_source():
    assert sources("data.train_files=a.jsonl", "data.train_max_samples=9") == [
        expected("train_files", "a.jsonl", max_samples=9)
    ]
    assert sources("data.train_files=[a.jsonl,'b/*.jsonl']") == [
        expected("train_files", ["a.jsonl", "b/*.jsonl"])
    ]
    assert sources("data.train_files=quickstart") == [expected("train_files", "quickstart")]
    assert sources(key="val_files") == []


def test_a_list_of_sources_on_the_command_line():
    word = (
        "data.train_files=[{name:code,files:[/d/code/*.jsonl,more.parquet],repeat:2.5,max_samples:100},"
        "{files:/d/math.jsonl,prompt_key:q,response_key:a,chat_template:math.jinja,tools_key:t}]"
    )
    own = {"prompt_key": "q", "response_key": "a", "chat_template": "math.jinja", "tools_key": "t"}
    assert sources(word, "data.train_max_samples=7") == [
        expected("code", ["/d/code/*.jsonl", "more.parquet"], repeat=2.5, max_samples=100),
        expected("math", "/d/math.jsonl", max_samples=7, **own),
    ]
    assert sources("data.train_files=[quickstart,{files:b.jsonl,repeat:2}]") == [
        expected("quickstart", "quickstart"),
        expected("b", "b.jsonl", repeat=2.0),
    ]
    assert sources("data.train_files={files:b.jsonl,repeat:2}") == [
        expected("b", "b.jsonl", repeat=2.0)
    ]
    assert sources(
        "data.val_files=[{files:b.jsonl}]", "data.val_max_samples=3", key="val_files"
    ) == [expected("b", "b.jsonl", max_samples=3)]


def test_what_a_source_leaves_open_is_as_in_data():
    common = (
        "data.prompt_key=q",
        "data.response_key=a",
        "data.chat_template=t.jinja",
        "data.messages_key=chat",
    )
    plain, chat = sources(
        *common, "data.train_files=[{files:a.jsonl},{files:b.jsonl,messages_key:m}]"
    )
    shared = {
        "prompt_key": "q",
        "response_key": "a",
        "chat_template": "t.jinja",
        "messages_key": "chat",
    }
    assert plain == expected("a", "a.jsonl", **shared)
    assert chat == expected("b", "b.jsonl", chat_template="t.jinja", messages_key="m"), (
        "it says where to look itself"
    )
    text, named = sources(
        *common, "data.train_files=[{files:a.jsonl,text_key:t},{files:b.jsonl,messages_key:m}]"
    )
    own = {"chat_template": "t.jinja", "messages_key": "chat"}
    assert text == expected("a", "a.jsonl", text_key="t", **own)
    assert named == expected("b", "b.jsonl", chat_template="t.jinja", messages_key="m")


MISTAKES = {
    "null": r"'data\.train_files' must be text or a list, got None",
    "[{files:a.jsonl},{files:b.jsonl,repeats:2}]": r"key 'data\.train_files\[1\]\.repeats': did "
    r"you mean '.*repeat'",
    "[{files:a.jsonl,weight:2}]": r"key 'data\.train_files\[0\]\.weight': no key has a similar "
    r"name; an entry has",
    "[{files:a.jsonl,repeat:0}]": r"'data\.train_files\[0\]\.repeat' must be in \(0, 1000\], got 0",
    "[{files:a.jsonl,repeat:-1}]": r"'data\.train_files\[0\]\.repeat' must be in \(0, 1000\]",
    "[{files:a.jsonl,repeat:inf}]": r"'data\.train_files\[0\]\.repeat' must be in \(0, 1000\]",
    "[{files:a.jsonl,repeat:often}]": r"'data\.train_files\[0\]\.repeat' must be a number, got 'often'",
    "[{files:a.jsonl,max_samples:0}]": r"'data\.train_files\[0\]\.max_samples' must be -1 \(all\) "
    r"or at least 1, got 0",
    "[{files:a.jsonl,prompt_key:q}]": r"'data\.train_files\[0\]\.prompt_key' and "
    r"'.*\.response_key' go together",
    "[{files:a.jsonl,prompt_key:q,response_key:a,text_key:t}]": r"text_key' and '.*prompt_key' "
    r"exclude each other",
    "[{files:x/a.jsonl},{files:y/a.jsonl}]": r"'data\.train_files' has 2 sources named 'a': give "
    r"each a name",
    "[{files:'*.jsonl'}]": r"'data\.train_files\[0\]' needs a name, which metrics carry: none "
    r"follows from its files",
    "[{files:a.jsonl,name:'a b'}]": r"'data\.train_files\[0\]\.name' must be made of letters, "
    r"digits",
    "[{name:a}]": r"missing configuration key 'data\.train_files\[0\]\.files'",
    "[{files:[]}]": r"'data\.train_files\[0\]\.files' is empty",
    "[]": r"'data\.train_files' is empty",
}


@pytest.mark.parametrize(("value", "message"), MISTAKES.items())
def test_a_mistake_in_a_source_names_place_and_fix(value, message):
    with pytest.raises(ConfigError, match=message):
        load_config([f"data.train_files={value}"])


def test_a_validation_measures_every_row_once():
    with pytest.raises(
        ConfigError, match=r"'data\.val_files\[0\]\.repeat' must be 1, got 2: a validation measures"
    ):
        load_config(["data.val_files=[{files:a.jsonl,repeat:2}]"])
