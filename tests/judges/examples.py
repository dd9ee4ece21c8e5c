"""`python examples.py FILES`: runs the examples of Anthropic's Python SDK, and prints what each printed, as JSON.

In one process, because importing the SDK takes longer than an example. Runs in the environment of
requirements-judges.lock."""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path


def printed(path: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


print(json.dumps({Path(path).name: printed(path) for path in sys.argv[1:]}))
