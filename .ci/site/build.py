"""`./dev docs`: README.md and docs/ as a site in dist/site; a broken link or an anchor that is missing fails.

    .venv/bin/python .ci/tools.py docs .ci/site/build.py

Pages link to each other and to files of the repository as they do in a checkout, so all of them are laid out as in a
checkout. From service/gateway/openapi.yaml and asyncapi.yaml a page each is written; docs/settings.md is written from
the settings already."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

HOUSE = Path(__file__).parents[2]
LAID_OUT = HOUSE / ".cache" / "site"
CONFIG = Path(__file__).with_name("mkdocs.yml")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NAVIGATION = {
    "Begin": [
        "README.md",
        "docs/README.md",
        "docs/install.md",
        "docs/your-rabbitmq.md",
        "docs/from-celery.md",
        "docs/from-litellm.md",
    ],
    "How to": """clients gateway webhooks lanes batches pipelines schedules providers brake dead-letters page runbook
        production kubernetes scale simulated""",
    "Reference": "contract http amqp sdks settings metrics logs tracing",
    "Explanation": """architecture reliability budget fairness security content-at-rest facts performance
        comparison""",
}


def lay_out() -> list[str]:
    """Copies the pages, and every file that they link to; returns the pages."""
    shutil.rmtree(LAID_OUT, ignore_errors=True)
    shutil.copytree(HOUSE / "docs", LAID_OUT / "docs")
    for page in PAGES:
        shutil.copy(HOUSE / page, LAID_OUT / page)
    LAID_OUT.joinpath("docs", "http.md").write_text("\n".join(http(_read("openapi.yaml"))))
    LAID_OUT.joinpath("docs", "amqp.md").write_text("\n".join(amqp(_read("asyncapi.yaml"))))
    for page in sorted(LAID_OUT.rglob("*.md")):
        page.write_text(LINK.sub(partial(_linked, page), page.read_text()))
    return [str(page.relative_to(LAID_OUT)) for page in sorted(LAID_OUT.rglob("*.md"))]


def _linked(page: Path, found: re.Match[str]) -> str:
    """The link, whose file is laid out beside the pages; of a folder, a list of its files."""
    link = found[1]
    if ":" in link:
        return link
    target = (page.parent / link).resolve()
    if not target.is_relative_to(LAID_OUT):
        return link  # mkdocs reports it
    source = HOUSE / target.relative_to(LAID_OUT)
    if source.is_dir():
        listed = target / "index.html"
        if not listed.exists():
            target.mkdir(parents=True, exist_ok=True)
            files = sorted(each for each in source.rglob("*") if each.is_file() and each.name != "secrets.env")
            names = [each.relative_to(source) for each in files]
            items = "".join(f'<li><a href="{name}">{name}</a>' for name in names)
            listed.write_text(f"<!doctype html><meta charset=utf-8><title>{source.name}</title><ul>{items}</ul>")
            for each in files:
                _copied(each)
        return f"{link.rstrip('/')}/index.html"
    if source.is_file():
        _copied(source)
    return link


def _copied(source: Path) -> None:
    target = LAID_OUT / source.relative_to(HOUSE)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(source, target)


def _read(name: str) -> Any:
    return yaml.safe_load((HOUSE / "service" / "gateway" / name).read_text())


def http(document: Any) -> Iterator[str]:
    """The gateway's interface as a page."""
    yield "# HTTP interface\n\nWritten from the gateway's OpenAPI document, which it serves as `/openapi.json`."
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in ("get", "post", "put", "delete", "patch"):
                continue
            yield f"\n## `{method.upper()} {path}`\n\n{_text(operation)}\n"
            both = (*operations.get("parameters", ()), *operation.get("parameters", ()))
            given = [_resolved(document, each) for each in both]
            if given:
                yield "| parameter | in | meaning |\n|---|---|---|"
            for each in given:
                yield f"| `{each['name']}` | {each['in']} | {_cell(_text(each))} |"
            yield "\n| answer | meaning |\n|---|---|"
            for status, answer in operation["responses"].items():
                yield f"| {status} | {_cell(_text(_resolved(document, answer)))} |"


def amqp(document: Any) -> Iterator[str]:
    """The interface over AMQP and the WebSocket as a page."""
    yield "# Messages\n\nWritten from the AsyncAPI document, which the gateway serves as `/asyncapi.json`."
    for name, channel in document["channels"].items():
        yield f"\n## {name}\n\nAddress: `{channel['address'] or 'the queue of reply_to'}`. {_text(channel)}\n"
        for key in channel["messages"]:
            message = document["components"]["messages"][key]
            yield f"\n### {name}: {key}\n\n{_text(message)}\n"
            headers = message.get("headers", {})
            if headers.get("properties"):
                yield "| header | required | schema |\n|---|---|---|"
            for header, schema in headers.get("properties", {}).items():
                required = "yes" if header in headers.get("required", ()) else ""
                yield f"| `{header}` | {required} | {_cell(f'`{json.dumps(schema)}`')} |"
            yield f"\n```json\n{json.dumps(message['payload'], indent=1)[:4000]}\n```"


def _resolved(document: Any, value: Any) -> Any:
    while "$ref" in value:
        found = document
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        value = found
    return value


def _text(value: Any) -> str:
    return " ".join(str(value[key]) for key in ("summary", "description") if value.get(key)).replace("<", "&lt;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def navigation(pages: list[str]) -> list[dict[str, list[str]]]:
    """All pages in their sections; those that have none come last."""
    found = []
    left = dict.fromkeys(pages)
    for section, names in NAVIGATION.items():
        listed = names if isinstance(names, list) else [f"docs/{name}.md" for name in names.split()]
        found.append({section: [page for page in listed if page in left]})
        for page in listed:
            left.pop(page, None)
    decisions = [page for page in left if page.startswith("docs/decisions/")]
    return [*found, {"Decisions": decisions}, {"Project": [page for page in left if page not in decisions]}]


def main() -> int:
    pages = lay_out()
    config = LAID_OUT.with_name("mkdocs.yml")
    settings = CONFIG.read_text().replace("../../", f"{HOUSE}/")
    config.write_text(f"{settings}nav: {json.dumps(navigation(pages))}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True
    )  # --quiet would hide warnings from --strict
    if done.returncode:
        print("\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO")))
    else:
        print(f"dist/site: {len(pages)} pages, no warning")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
