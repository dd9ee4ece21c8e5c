"""Starts LiteLLM's proxy, in its own process and virtual environment, for benchmarks beside it.

    python3 -m venv .cache/litellm
    .cache/litellm/bin/pip install --only-binary :all: 'litellm[proxy]==1.106.2'

Pin the version: three releases of LiteLLM (1.82.7, 1.82.8, 1.107.0) are reported not to be from its authors.
"""

import asyncio
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.harness.load import MODEL
from benchmarks.harness.processes import START_WITHIN_S, process
from tests.support.private_broker import LOOPBACK, free_ports

PROGRAM = Path(".cache/litellm/bin/litellm")
WHY_NOT = f"LiteLLM: no {PROGRAM}; benchmarks/litellm.py says how to install it"
PRIORITIES = {"critical": 1, "normal": 50, "batch": 100}
"""Lower numbers go first; version 1.106 ignores 0."""
_MODEL = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: anthropic/{model}
      api_base: {base_url}
      api_key: benchmark
"""
PRODUCTION = """\
router_settings:
  num_retries: 0
litellm_settings:
  set_verbose: false
  json_logs: true
  callbacks: []
general_settings:
  disable_spend_logs: true
  disable_error_logs: true
"""
"""No database, and only errors are logged, as its documentation advises for production."""
LIMITED = """\
      rpm: {requests}
      itpm: {input_tokens}
router_settings:
  num_retries: 0
  timeout: 3600
"""
"""As its documentation of priorities shows. Its own retries would bypass the queue by priority. The queue lets every
request through while a deployment is healthy, and a deployment without an alternative always counts as healthy."""
STRICT = """\
  optional_pre_call_checks: [enforce_model_rate_limits]
  allowed_fails_policy: {RateLimitErrorAllowedFails: 0}
  cooldown_time: 1
"""
"""Added to LIMITED: the limits are enforced before each call, and the deployment is paused at the first 429, so that
the queue is used. The proxy counts calls, refused ones too, by the minute of the wall clock."""


def version() -> str:
    """The version of the installed package, as its own Python reports it."""
    code = "from importlib.metadata import version; print(version('litellm'))"
    printed = subprocess.run([PROGRAM.parent / "python", "-c", code], capture_output=True, text=True, check=True)
    return printed.stdout.strip()


@asynccontextmanager
async def proxy(
    folder: Path, base_url: str, settings: str, *, options: Sequence[str] = ()
) -> AsyncIterator[tuple[str, dict[str, str], int]]:
    """Run the proxy. Yields its URL, the headers of a call, and its process id."""
    (port,), key = free_ports(1), f"sk-{secrets.token_hex(16)}"
    home = folder / f"litellm-{port}"
    home.mkdir()
    (home / "config.yaml").write_text(_MODEL.format(model=MODEL, base_url=base_url) + settings)
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    environ = {**kept, "HOME": str(home), "LITELLM_MASTER_KEY": key}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    command = [str(PROGRAM.absolute()), "--config", "config.yaml", "--host", LOOPBACK, "--port", str(port), *options]
    url = f"http://{LOOPBACK}:{port}"
    async with process(command, environ=environ, log=home / "log", port=port) as pid:
        async with asyncio.timeout(START_WITHIN_S), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/health/liveliness") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.2)
        yield url, {"authorization": f"Bearer {key}"}, pid
