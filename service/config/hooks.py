"""The settings of webhooks."""

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from consumers.flows.webhooks import WebhookSpec, is_host
from service.config.value_types import Disagreement, Number, Section, clash, words, wrong

SECRET_BYTES = range(24, 65)
"""What Standard Webhooks allows."""
BEGIN = "whsec_"


def _host(text: str) -> str:
    if not is_host(text):
        raise wrong("hosts such as hooks.example.com, *.example.com or hooks.example.com:8443, separated by commas")
    return text.lower()


def _secret(value: SecretStr) -> SecretStr:
    text = value.get_secret_value().strip()
    with suppress(ValueError):  # it is not base64
        if text.startswith(BEGIN) and len(base64.b64decode(text.removeprefix(BEGIN), validate=True)) in SECRET_BYTES:
            return SecretStr(text)
    raise wrong("whsec_ and 24 to 64 random bytes in base64, such as from: openssl rand -base64 32")


class WebhooksSettings(Section):
    """Where the outcomes of requests may be posted (`x-lane-webhook`), and how they are signed."""

    allow_hosts: Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(words)] = ()
    """The hosts that webhooks may name; without any, webhooks are off. `*.example.com` allows all hosts below
    example.com, `*` any host; a port that is not the scheme's own must be named. Example:
    hooks.example.com,*.crm.example.com:8443"""
    secrets: Annotated[tuple[Annotated[SecretStr, AfterValidator(_secret)], ...], BeforeValidator(words)] = ()
    """The secrets with which posts are signed, by Standard Webhooks. Each signs, so that a new one can be added before
    the old one is removed. Example: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"""
    allow_private: bool = False
    """Whether hosts may have private, loopback or link-local addresses. For trying it out."""
    allow_http: bool = False
    """Whether URLs may begin with `http:`. For trying it out."""
    timeout_s: Number[float] = Field(default=15, gt=0, le=120)
    """How long one post may take."""
    first_pause_s: Number[float] = Field(default=5, gt=0, le=3600)
    """How long to wait after the first post that failed. Each further pause is twice as long as the one before, up to
    six hours."""
    give_up_s: Number[float] = Field(default=3 * 86_400, gt=0, le=30 * 86_400)
    """For how long a post is tried again; then it becomes a dead letter."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.allow_hosts and not self.secrets:
            yield clash("needs LANEKEEPER_WEBHOOKS__SECRETS, because receivers must see who has posted", "allow_hosts")

    def spec(self) -> WebhookSpec:
        return WebhookSpec(
            hosts=self.allow_hosts,
            secrets=tuple(secret.get_secret_value() for secret in self.secrets),
            private=self.allow_private,
            http=self.allow_http,
            timeout_s=self.timeout_s,
            first_pause_s=self.first_pause_s,
            give_up_s=self.give_up_s,
        )
