"""A contestant: LiteLLM's proxy with its priority scheduler, in its own process and virtual environment.

    python3 -m venv .cache/litellm
    .cache/litellm/bin/pip install --only-binary :all: 'litellm[proxy]==1.106.2'

Pin the version: three releases of LiteLLM (1.82.7, 1.82.8, 1.107.0) are reported not to be from its authors.

Each request has a `priority`; lower numbers go first (version 1.106 ignores 0, so the numbers begin at 1). A refused
request is sent again after a second and passes the proxy's queue again; the proxy's own retries would bypass that
queue. At most as many requests are sent at a time as Lanekeeper has slots: with all 500 at once, the proxy answered
almost no critical request.

The proxy takes part in two configurations. The first is shown in LiteLLM's documentation of priorities: the queue lets
every request through while a deployment is healthy, and a deployment without an alternative always counts as healthy.
The second (`STRICT`) enforces the limits before each call and pauses the deployment at the first 429, so that the queue
is used. The proxy counts calls, refused ones too, by the minute of the wall clock, so it makes a minute's calls at the
beginning of the minute.
"""

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from contest.load import MODEL, Ask, Asking, Load

from service.private_broker.source import LOOPBACK, free_ports
from topology.lanes import DEFAULT_LANES

PROGRAM = Path(".cache/litellm/bin/litellm")
PRIORITIES = {"critical": 1, "normal": 50, "batch": 100}
START_WITHIN_S = 180
AGAIN_S = 1.0
"""The pause after a refusal without `retry-after`."""
_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: anthropic/{model}
      api_base: {base_url}
      api_key: benchmark
      rpm: {requests}
      itpm: {input_tokens}
router_settings:
  num_retries: 0
  timeout: 3600
"""
STRICT = """\
  optional_pre_call_checks: [enforce_model_rate_limits]
  allowed_fails_policy: {RateLimitErrorAllowedFails: 0}
  cooldown_time: 1
"""


def why_not(load: Load, program: Path) -> str | None:
    """The reason why LiteLLM cannot take part; None if it can."""
    if not program.exists():
        return f"no {program}; see benchmarks/contest/litellm.py"
    if load.speed != 1:
        return "it counts by the minute of the wall clock, which cannot be made faster; use --speed 1"
    return None


async def version(program: Path) -> str:
    """The version of the installed package, as its own Python reports it."""
    code = "from importlib.metadata import version; print(version('litellm'))"
    asked = await asyncio.create_subprocess_exec(
        str(program.parent / "python"), "-c", code, env=_environment(), stdout=asyncio.subprocess.PIPE
    )
    return (await asked.communicate())[0].decode().strip()


@asynccontextmanager
async def proxy(base_url: str, load: Load, *, program: Path, further: str = "") -> AsyncIterator[Asking]:
    """Runs the proxy; yields a function that sends a request through it. `further`: lines to append to its settings."""
    slots = {lane.name: asyncio.Semaphore(lane.slots) for lane in DEFAULT_LANES}
    config = _CONFIG.format(
        model=MODEL,
        base_url=base_url,
        requests=load.requests_per_minute,
        input_tokens=load.input_tokens_per_minute,
    )
    async with started(config + further, program=program) as (url, key, _):
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def ask(ask: Ask) -> None:
                body = {**json.loads(ask.body), "priority": PRIORITIES[ask.lane]}
                async with slots[ask.lane]:
                    while True:
                        again_s = await _attempt(session, url, body)
                        if again_s is None:
                            return
                        await asyncio.sleep(again_s)

            yield ask


@asynccontextmanager
async def started(config: str, *, program: Path, options: Sequence[str] = ()) -> AsyncIterator[tuple[str, str, int]]:
    """Runs the proxy with a configuration file of this text. Yields its URL, a key for it, and its process id. Raises
    TimeoutError if it does not start."""
    (port,), program = free_ports(1), program.absolute()
    url, key = f"http://{LOOPBACK}:{port}", f"sk-{secrets.token_hex(16)}"
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config)
        with Path(folder, "log").open("wb") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                *(str(program), "--config", str(path), "--host", LOOPBACK, "--port", str(port), *options),
                env={**_environment(), "LITELLM_MASTER_KEY": key, "HOME": folder},
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        try:
            async with aiohttp.ClientSession() as session:
                await _answers_health_checks(session, url)
            yield url, key, process.pid
        finally:
            process.terminate()
            await process.wait()


async def _attempt(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> float | None:
    """Send one request. Returns the seconds until the next try; None if it was answered."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with session.post(f"{url}/v1/chat/completions", json=body, timeout=timeout) as response:
        await response.read()
        if response.status == 200:
            return None
        return float(response.headers.get("retry-after", AGAIN_S))


async def _answers_health_checks(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_WITHIN_S):
        while True:
            try:
                async with session.get(f"{url}/health/liveliness") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)


def _environment() -> dict[str, str]:
    kept = {"PATH", "HOME", "LANG", "TMPDIR"}
    return {
        **{name: value for name, value in os.environ.items() if name in kept},
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
