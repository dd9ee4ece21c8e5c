"""docs/fixed-values.md has every number that is written into the code in capitals, with its value."""

from tests.support.fixed_values_page import PAGE, page


def test_the_page_is_made_of_the_code() -> None:
    assert page() == PAGE.read_text(), "if the change is meant: .venv/bin/python -m tests.support.fixed_values_page"
