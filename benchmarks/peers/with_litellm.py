"""Runs LiteLLM's Python proxy before the simulated API, for `POST /v1/messages`. It has no database, a worker for each
core, and logs only errors, as its documentation advises for production. benchmarks/contest/litellm.py says how to
install it.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contest import litellm

CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: anthropic/{model}
      api_base: {base_url}
      api_key: benchmark
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


@asynccontextmanager
async def served(base_url: str, *, model: str, program: Path) -> AsyncIterator[tuple[str, str, int]]:
    """Runs the proxy; yields its URL, a key for it, and its process id."""
    config = CONFIG.format(model=model, base_url=base_url)
    options = ("--num_workers", str(os.cpu_count() or 1))
    async with litellm.started(config, program=program, options=options) as found:
        yield found
