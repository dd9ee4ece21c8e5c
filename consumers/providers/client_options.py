"""The options of all clients of Anthropic's SDK that a worker uses: no retries, no spans, and the fastest transport
(aiohttp)."""

from functools import cache
from ipaddress import ip_address
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from anthropic import DefaultAioHttpClient

from consumers.providers.error_body import bound_error_body

CONNECT_TIMEOUT_S: Final = 5.0
"""The time limit, in seconds, for connecting to a provider."""


def client_options(base_url: str) -> dict[str, Any]:
    """The options of an Anthropic SDK client for the API at this address."""
    # Calls to this machine do not use the proxy that the environment names.
    trust_env = not _is_here(base_url)
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        # A redirect would send the prompt to an address that is in no setting.
        "http_client": DefaultAioHttpClient(
            event_hooks={"response": [bound_error_body]},
            verify=_certificates(trust_env=trust_env),
            trust_env=trust_env,
            follow_redirects=False,
        ),
    }


@cache
def _certificates(*, trust_env: bool) -> SSLContext:
    """The trusted TLS certificates, which take 25 ms to read. All clients share them."""
    return httpx2.create_ssl_context(trust_env=trust_env)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
