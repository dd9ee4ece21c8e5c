"""What a failed attempt says in logs and events: a provider's words only where they look like what they should be."""

import pytest

from consumers.failures import OverloadedError, ProviderError, TransientError


@pytest.mark.parametrize(
    ("error", "brief"),
    [
        (OverloadedError("a prompt", request_id="req_01/a@b:c.d-e"), "overloaded_error 529 (req_01/a@b:c.d-e)"),
        (TransientError("a prompt", status=500, type="a prompt", request_id="a prompt"), "TransientError 500 (?)"),
        (TransientError("a prompt", type="cut", request_id="a" * 101), "cut (?)"),
        (TransientError("a prompt", type="a\n", request_id="a\n"), "TransientError (?)"),
        (TransientError("a prompt", type="cut"), "cut"),
    ],
)
def test_its_brief_has_names_and_ids_and_no_text(error: ProviderError, brief: str) -> None:
    assert error.brief == brief
