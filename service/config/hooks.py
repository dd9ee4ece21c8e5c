"""The settings of webhooks."""

import base64
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from consumers.flows.webhooks import Hooks, WebhookSpec, is_host
from service.config.value_types import Disagreement, Number, Section, clash, words, wrong

SECRET_BYTES = range(24, 65)
"""What Standard Webhooks allows."""
BEGIN = "whsec_"


def _host(text: str) -> str:
    """In lower case, an IPv6 address in its usual form, a name without the dot at its end."""
    if not is_host(text):
        raise wrong("hosts such as hooks.example.com, *.example.com or hooks.example.com:8443, separated by commas")
    address, bracket, port = text.lower().partition("]")
    if bracket:
        with suppress(ValueError):  # no address: it fits no URL
            return f"[{IPv6Address(address[1:])}]{port}"
    host, colon, port = text.lower().partition(":")
    return f"{host.removesuffix('.')}{colon}{port}"


def _hosts(value: Any) -> Any:
    """Like `words`, but an IPv6 address in brackets begins no JSON array."""
    is_address = isinstance(value, str) and re.match(r"\s*\[[0-9a-f:.]+\]", value, re.IGNORECASE)
    return [word.strip() for word in value.split(",") if word.strip()] if is_address else words(value)


def _secret(value: SecretStr) -> SecretStr:
    text = value.get_secret_value().strip()
    with suppress(ValueError):  # it is not base64
        if text.startswith(BEGIN) and len(base64.b64decode(text.removeprefix(BEGIN), validate=True)) in SECRET_BYTES:
            return SecretStr(text)
    raise wrong("whsec_ and 24 to 64 random bytes in base64, such as from: openssl rand -base64 32")


Hosts = Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(_hosts)]
Secrets = Annotated[tuple[Annotated[SecretStr, AfterValidator(_secret)], ...], BeforeValidator(words)]


def _hooks(section: "TenantWebhooksSettings | WebhooksSettings") -> Hooks:
    return Hooks(hosts=section.allow_hosts, secrets=tuple(secret.get_secret_value() for secret in section.secrets))


class TenantWebhooksSettings(Section):
    """The webhooks of one tenant, which shares no secret with another."""

    allow_hosts: Hosts = ()
    """The hosts that this tenant's webhooks may name, as above. Example: hooks.crm.example.com"""
    secrets: Secrets = ()
    """The secrets with which this tenant's posts are signed. Example: whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"""

    def disagreements(self) -> Iterator[Disagreement]:
        for name in ("allow_hosts", "secrets"):
            if not getattr(self, name):
                yield clash("is needed: the common one is for requests without a tenant", name)


class WebhooksSettings(Section):
    """Where the outcomes of requests may be posted (`x-lane-webhook`), and how they are signed."""

    allow_hosts: Hosts = ()
    """The hosts that webhooks of requests without a tenant may name. `*.example.com` allows all hosts below
    example.com, `*` any host; a port that is not the scheme's own must be named. Example:
    hooks.example.com,*.crm.example.com:8443,[2606:4700::1111]"""
    secrets: Secrets = ()
    """The secrets with which these posts are signed, by Standard Webhooks. Each signs, so that a new one can be added
    before the old one is removed. Example: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"""
    tenants: dict[str, TenantWebhooksSettings] = Field(default_factory=dict)
    """By tenant: where its outcomes may be posted, and how they are signed. A tenant that is not named here has no
    webhooks, because with a common secret it could forge another tenant's."""
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
        owners = {"secrets": _hooks(self), **{f"tenants.{name}": _hooks(each) for name, each in self.tenants.items()}}
        used = Counter(secret for hooks in owners.values() for secret in set(hooks.secrets))
        if shared := [name for name, hooks in owners.items() if any(used[secret] > 1 for secret in hooks.secrets)]:
            yield clash(f"{', '.join(shared)} have one secret: with it, each could forge the other's posts", "tenants")

    def spec(self) -> WebhookSpec:
        return WebhookSpec(
            hooks=_hooks(self),
            tenants={name: _hooks(each) for name, each in self.tenants.items()},
            private=self.allow_private,
            http=self.allow_http,
            timeout_s=self.timeout_s,
            first_pause_s=self.first_pause_s,
            give_up_s=self.give_up_s,
        )
