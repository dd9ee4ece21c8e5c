"""Claude Code, unmodified, as a judge: what it is asked, and how it is run without any other network than the API's.

Its program is that of the npm package locked in `claude/`. Each scene is run at the simulated API and through the
gateway, with the same empty home; compared are what it prints, and every byte that then arrives at the API: the body,
and the headers that a gateway has to pass on."""

import json
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "claude"
BETA = "claude-code"
"""Part of the header `anthropic-beta` of its calls."""
NOWHERE = "http://127.0.0.1:1"
"""Where its calls to other hosts end."""
SESSION = "11111111-1111-4111-8111-111111111111"
COMMON = (
    "--output-format",
    "json",
    "--no-session-persistence",
    "--session-id",
    SESSION,
    "--system-prompt",
    "Be brief.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One run: a prompt, in which `[[call: NAME {…}]]` lets the model call this tool."""

    prompt: str
    tools: str = ""
    model: str = "claude-opus-5-5"
    environ: Mapping[str, str] = field(default_factory=dict)


def _agent(name: str) -> str:
    asked = {"description": name, "prompt": f"You are the {name} one.", "run_in_background": False}
    return f"[[call: Agent {json.dumps(asked)}]]"


_BASH = '[[call: Bash {"command": "printf from-the-tool"}]]'
_WITHOUT_THINKING = {"MAX_THINKING_TOKENS": "0"}
SCENES: Mapping[str, Scene] = {
    "one word": Scene(prompt="Reply with one word: connected"),
    "a tool turn, thinking on": Scene(prompt=_BASH, tools="Bash"),
    "a tool turn, thinking off": Scene(prompt=_BASH, tools="Bash", model="claude-haiku-4-5", environ=_WITHOUT_THINKING),
    "two sub-agents": Scene(prompt=f"{_agent('first')} {_agent('second')}", tools="Agent"),
    "prompt too long": Scene(prompt="[[fault: prompt_too_long]]"),
    "an overload that passes": Scene(prompt="[[fault: overloaded x1]] patience"),
    "an unknown model": Scene(prompt="nobody", model="claude-nobody"),
}


def environment(home: Path, url: str, scene: Scene) -> dict[str, str]:
    """Its own folders, made anew, with an identity that is always the same."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "work").mkdir(parents=True)
    (home / ".claude.json").write_text(json.dumps({"userID": "0" * 64}))
    return {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
        **scene.environ,
    }


def arguments(scene: Scene) -> list[str]:
    return [
        "-p",
        scene.prompt,
        *COMMON,
        "--model",
        scene.model,
        "--tools",
        scene.tools,
        "--allowed-tools",
        "Bash,Agent",
    ]


def told(printed: str) -> dict[str, Any]:
    """What it printed, without what differs from run to run."""
    found: dict[str, Any] = json.loads(plain(printed.splitlines()[0]))
    changing = {"uuid"}
    if found["subagent_stats"]["spawned"]:  # their reports contain how long they took, so the tokens vary
        changing |= {"usage", "modelUsage", "total_cost_usd"}
    return {name: value for name, value in found.items() if not name.endswith("_ms") and name not in changing}


def plain(text: str) -> str:
    """Without the ids and times of sub-agents."""
    return re.sub(r"(agentId: |duration_ms: )\w+", r"\1…", text)


def shown(result: str) -> str:
    """The simulated model's words in the result, else all of it."""
    said = [textwrap.shorten(line, 60, placeholder=" …") for line in re.findall(r"echo: .*", result)]
    return " / ".join(said) or " ".join(result.split())
