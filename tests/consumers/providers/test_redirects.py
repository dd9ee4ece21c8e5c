"""A provider that redirects: the request goes only to the URL that was set."""

from collections.abc import Callable

import pytest

from consumers.failures import RejectedError
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.cloud import bedrock, foundry, vertex
from tests.consumers.providers.conftest import AskedFor
from tests.support.corpus.answers import redirect
from tests.support.malicious_provider import MaliciousProvider

Made = Callable[[str], AnthropicProvider]
KINDS: dict[str, Made] = {
    "anthropic": lambda url: AnthropicProvider.at(url, api_key="sk-ant-k"),
    "bedrock": lambda url: bedrock(name="b", region="us-east-1", api_key="k", base_url=url),
    "vertex": lambda url: vertex(name="v", region="us-east5", project="p", api_key="k", base_url=url),
    "foundry": lambda url: foundry(name="f", api_key="k", base_url=url),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_redirect_is_not_followed_and_ends_the_request(kind: str, status: int, asked: AskedFor) -> None:
    async with MaliciousProvider() as inside:
        to = f"{inside.base_url}/v1/messages?token=s3cret"
        async with MaliciousProvider(redirect(to, status=status)) as outside:
            provider = KINDS[kind](outside.base_url)
            with pytest.raises(RejectedError) as refused:
                await provider.stream(asked("secret"), timeout_s=60, parts=None)
            await provider.aclose()

    assert len(outside.asked) == 1
    assert inside.asked == []
    assert (refused.value.type, refused.value.status) == ("redirected", 502)
    assert "redirects to 127.0.0.1" in refused.value.detail
    assert "s3cret" not in refused.value.detail
