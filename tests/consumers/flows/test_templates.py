"""A template fills in its inputs, and reaches nothing else."""

from typing import Any

import pytest

from consumers.flows.templates import MOST_BYTES, Expression, Template, TooLong, Unrendered

VALUES: dict[str, Any] = {
    "input": {"word": "river", "list": ["a", "b"], "items": 1, "many": list(range(100_000))},
    "before": "text",
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ input.word }} {{ before|upper }}", "river TEXT"),
        ("{% for one in input.list %}{{ loop.index }}{{ one }};{% endfor %}", "1a;2b;"),
        ("{{ input.list|join('-') }} {{ input.list|tojson }} {{ input.list|length }}", 'a-b ["a", "b"] 2'),
        ("{{ input.items }}", "1"),
        ("{% if input.word == 'river' %}yes{% else %}no{% endif %} {{ 2 * 3 + input.items }}", "yes 7"),
        ("<b>&{{ '<' }}\n", "<b>&<\n"),
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
    ],
)
def test_a_template_reaches_nothing_but_its_inputs(source: str) -> None:
    with pytest.raises(Unrendered):
        Template(source).render(VALUES)


def test_what_a_template_becomes_is_bounded() -> None:
    with pytest.raises(TooLong, match=str(MOST_BYTES)):
        Template("{% for a in input.many %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}").render(VALUES)
    with pytest.raises(Unrendered, match="a loop in a loop is not available"):
        Template("{% for a in input.many %}{% if a %}{% for b in input.many %}{% endfor %}{% endif %}{% endfor %}")
    with pytest.raises(Unrendered, match="not rendered within 1 s"):
        Template("{% for a in input.many %}{{ input.many|sum }}{% endfor %}").render(VALUES)


def test_an_error_names_nothing_that_was_put_in() -> None:
    with pytest.raises(Unrendered) as raised:
        Template("{{ before + 1 }}").render({"before": "a secret"})
    assert str(raised.value) == "TypeError"


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
