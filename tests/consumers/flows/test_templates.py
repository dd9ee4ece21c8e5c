"""A template fills in its inputs, and reaches nothing else."""

import json
import sys
import time
from typing import Any

import pytest

from consumers.flows import templates
from consumers.flows.templates import (
    MOST_BYTES,
    Expression,
    Template,
    TooLong,
    Unrendered,
    filled_in,
)

VALUES: dict[str, Any] = {
    "input": {
        "word": "river",
        "list": ["a", "b"],
        "items": 1,
        "many": list(range(100_000)),
        "long": "x" * 600_000,
        "object": {"a": None, "b": ["ü"]},
    },
    "before": "text",
}
STATE = json.dumps({"input": VALUES["input"], "outputs": {"before": "text"}}).encode()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ input.word }} {{ before|upper }}", "river TEXT"),
        ("{% for one in input.list %}{{ loop.index }}{{ one }};{% endfor %}", "1a;2b;"),
        ("{{ input.list|join('-') }} {{ input.list|tojson }} {{ input.list|length }}", 'a-b ["a", "b"] 2'),
        ("{{ input.items }}", "1"),
        ("{{ input.object }} {{ none }} {{ true }} {{ 1.5 }}", '{"a": null, "b": ["ü"]} null true 1.5'),
        (
            "{{ input.object ~ '-' ~ 1 }} {{ [input.object, 'x']|join(' ') }}",
            '{"a": null, "b": ["ü"]}-1 {"a": null, "b": ["ü"]} x',
        ),
        ("{{ input.list|map('upper') }} {{ input.absent.more|default('none') }}", '["A", "B"] none'),
        ("{% if input.word == 'river' %}yes{% else %}no{% endif %} {{ 2 * 3 + input.items }}", "yes 7"),
        ("<b>&{{ '<' }}\n", "<b>&<\n"),
        ("{% for a in input.list %}{% for b in input.list %}{{ a ~ b }} {% endfor %}{% endfor %}", "aa ab ba bb "),
    ],
)
def test_a_template_is_filled_in(source: str, expected: str) -> None:
    assert Template(source).render(VALUES) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ input.__class__ }}",
        "{{ input['__class__'] }}",
        "{{ input.keys }}",
        "{{ input.list.append(1) }}",
        "{{ before.format }}",
        "{{ ''.join(input.list) }}",
        "{{ range(3) }}",
        "{{ lipsum() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ input|attr('word') }}",
        "{{ input.list|map(attribute='__class__')|join }}",
        "{{ 'x' * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% include 'secret' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% macro m() %}x{% endmacro %}{{ m() }}",
        "{{ input.absent }}",
        "{{ input.list[7] }}",
        "{{ absent }}",
        "{{ input.word|replace('r', input.long) }}",
        "{{ input.word|center(1000000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 1.5|round(1000000000) }}",
        "{{ [input.list, input.list]|sum(start=[]) }}",
        "{% set kept %}{% for a in input.many %}x{% endfor %}{% endset %}",
        "{% filter upper %}x{% endfilter %}",
    ],
)
def test_a_template_reaches_nothing_but_its_inputs(source: str) -> None:
    with pytest.raises(Unrendered):
        Template(source).render(VALUES)


def test_what_a_template_becomes_is_bounded() -> None:
    with pytest.raises(TooLong, match=str(MOST_BYTES)):
        Template("{% for a in input.many %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}").render(VALUES)
    for source in (
        "{{ input.many|join(input.long) }}",
        "{% set a = input.long ~ input.long %}",
        "{{ input.long + input.long }}",
    ):
        with pytest.raises(TooLong, match=str(MOST_BYTES)):
            Template(source).render(VALUES)


@pytest.fixture
def dropped_exceptions_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own hook makes them failures. It is long enough for the next signal to come in it, too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


FINDS: dict[str, Any] = {"prompt": "", "value": "input", "each": "", "numbers": ()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        "{% for a in input.many %}{{ input.many|sum }}{% endfor %}",
        "{% for a in input.many %}{% if -1 in input.many %}{% endif %}{% endfor %}",
        "{% for a in input.many %}{% for b in input.many %}{% endfor %}{% endfor %}",
        "{{ input.many|reject('in', input.many)|list }}",
    ],
)
def test_a_template_takes_a_second_of_cpu_time_at_most(prompt: str) -> None:
    began_s = time.process_time()
    with pytest.raises(Unrendered, match="more than 1 s of CPU time; give it less input"):
        filled_in(STATE, **{**FINDS, "prompt": prompt})
    assert time.process_time() - began_s < 2


@pytest.mark.slow
@pytest.mark.usefixtures("dropped_exceptions_are_fine")
def test_the_items_of_a_fan_out_are_filled_in_together_and_not_for_too_long() -> None:
    every: dict[str, Any] = {"each": "input.many", "numbers": range(1000)}
    texts, count = filled_in(STATE, **{**FINDS, **every, "prompt": "{{ number }}: {{ item }} of {{ before }}"})
    assert (texts[0], texts[-1], count) == (b"1: 0 of text", b"1000: 999 of text", 100_000)
    slow, _ = filled_in(STATE, **{**FINDS, **every, "prompt": "{{ input.many|sort|length }}"})
    assert 0 < len(slow) < 100, "the others' turn comes"
    large, _ = filled_in(STATE, **{**FINDS, **every, "prompt": "{{ input.long }}"})
    assert len(large) == 2
    values, _ = filled_in(STATE, **{**FINDS, **every, "value": "item"})
    assert values == [b"%d" % number for number in range(1000)]


@pytest.mark.usefixtures("dropped_exceptions_are_fine")
def test_the_limit_of_cpu_time_holds_where_a_destructor_drops_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CPU_S", 0.01)

    class Dear:
        def __del__(self) -> None:
            while True:
                pass

    def dear() -> None:
        Dear()  # the first signal ends this
        while True:
            pass

    with pytest.raises(Unrendered, match="CPU time"), templates._cpu_limited():
        dear()


def test_an_item_that_cannot_be_filled_in_is_refused_when_it_is_the_first() -> None:
    order = {**FINDS, "each": "input.list", "prompt": "{{ 1 / (2 - number) }}"}
    assert filled_in(STATE, **{**order, "numbers": (0, 1)}) == ([b"1.0"], 2)
    with pytest.raises(Unrendered, match="divides by zero"):
        filled_in(STATE, **{**order, "numbers": (1,)})


def test_an_error_names_nothing_that_was_put_in() -> None:
    with pytest.raises(Unrendered) as raised:
        Template("{{ before + 1 }}").render({"before": "a secret"})
    assert "secret" not in str(raised.value)


def test_the_names_that_a_template_uses_are_known_before() -> None:
    assert Template("{% set own = input.a %}{{ own }}{{ later.x }}").names == {"input", "later"}
    assert Expression("input.pages").names == {"input"}
    with pytest.raises(Unrendered, match="line 2"):
        Template("\n{% for %}")
    for wrong in ("input..pages", "a) }}{{ (b"):
        with pytest.raises(Unrendered):
            Expression(wrong)


def test_an_expression_gives_a_value_not_its_text() -> None:
    assert Expression("input.list").value(VALUES) == ["a", "b"]
    with pytest.raises(Unrendered):
        Expression("input.absent").value(VALUES)
    with pytest.raises(Unrendered):
        Expression("input.absent.more").value(VALUES)
