"""Handlers and pipelines in the settings: what is wrong is refused at start, all at once, by name."""

from pathlib import Path

import pytest

from lanekeeper.contract.problems import SettingsError
from tests.support.settings import load

WRONG_TOGETHER = """
[handlers.messages]
run = "a:b"

[handlers.Upper]
run = "a:b"

[[pipelines.p.steps]]
name = "first"
prompt = "x"
lane = "nowhere"

[[pipelines.p.steps]]
name = "second"
handler = "absent"
"""
WRONG = """
[handlers.nowhere]
kind = "cpu"

[handlers.badly]
run = "no function"

[handlers.takes_many]
run = "a:b"
many = true
count = 1

[[pipelines.p.steps]]
name = "first"
prompt = "{{ second }} {{ inptu }}"

[[pipelines.p.steps]]
name = "second"
prompt = "{% for %}"
on_failure = "skip"

[[pipelines.p.steps]]
name = "second"
handler = "absent"
model = "m"

[[pipelines.p.steps]]
name = "itself"
prompt = "{{ itself }}"
each = "item"

[[pipelines.p.steps]]
name = "input"
prompt = "x"
handler = "badly"

[[pipelines.r.steps]]
name = "before"
prompt = "{{ after }}"

[[pipelines.r.steps]]
name = "after"
prompt = "x"

[[pipelines.r.steps]]
name = "loop"
prompt = "x"

[[pipelines.q.steps]]
name = "one"
promt = "x"
"""


def told(toml: str, folder: Path) -> str:
    file = folder / "lanekeeper.toml"
    file.write_text(toml)
    with pytest.raises(SettingsError) as refused:
        load(file)
    return str(refused.value)


def test_what_is_wrong_is_told_by_name_all_at_once(tmp_path: Path) -> None:
    text = told(WRONG_TOGETHER, tmp_path)
    for line in (
        "handlers.messages.run in {file}: the name messages is taken: by the model",
        "handlers.Upper.run in {file}: 'Upper' is no name",
        "pipelines.p.steps in {file}: step 'first': lane 'nowhere' is not declared",
        "pipelines.p.steps in {file}: step 'second': handler 'absent' is not declared",
    ):
        assert line.replace("{file}", str(tmp_path / "lanekeeper.toml")) in text, text

    text = told(WRONG, tmp_path)
    for line in (
        "handlers.nowhere.run in {file}: is not set",
        "handlers.badly.run in {file}: found 'no function', allowed is module:function",
        "handlers.takes_many.count in {file}: found",
        "pipelines.p.steps in {file}: step 'first': it uses 'second', which has not run then: steps run in order",
        "pipelines.p.steps in {file}: step 'first': it uses 'inptu', and there are only input",
        "pipelines.p.steps in {file}: step 'second': its template cannot be read: line 1",
        "pipelines.p.steps in {file}: step 'second': on_failure is for the items of `each`",
        "pipelines.p.steps in {file}: step 'second': there are two steps of this name",
        "pipelines.p.steps in {file}: step 'second': model and max_tokens are for a prompt",
        "pipelines.p.steps in {file}: step 'itself': it uses 'itself', which has not run then",
        "pipelines.p.steps in {file}: step 'itself': it uses 'item'",
        "pipelines.p.steps in {file}: step 'input': is no name",
        "pipelines.p.steps in {file}: step 'input': give it a prompt or a handler",
        "pipelines.r.steps in {file}: step 'before': it uses 'after', which has not run then",
        "pipelines.r.steps in {file}: step 'loop': is a word of templates",
        "pipelines.q.steps in {file}: found",
        "in the environment as JSON; there is no 'promt'",
    ):
        assert line.replace("{file}", str(tmp_path / "lanekeeper.toml")) in text, text
