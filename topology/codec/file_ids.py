"""Finds the files of Anthropic's Files API that a request names, and those that an answer tells of."""

import re
from collections.abc import Mapping
from typing import Any, Final

from lanekeeper.contract.problems import RequestProblem

_IDS_AT_MOST: Final = 1000
MAY_NAME: Final = re.compile(rb"file_id|\\u00[4-7]")
"""Only the JSON of a body in which this is found need be looked at. A key may be written with escaped letters, which no
encoder does by itself."""


def named_in(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids in a request's body, wherever they are: in sources, containers, or the results of tools. What a model has
    given to a tool is not looked at, because that is anybody's JSON. Raises RequestProblem if there are too many."""
    found: dict[str, None] = {}
    nodes: list[Any] = [body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            several = node.get("file_ids")
            for id in (node.get("file_id"), *(several if isinstance(several, list) else ())):
                if isinstance(id, str):
                    found[id] = None
            is_call = str(node.get("type")).endswith("tool_use")
            nodes += [value for key, value in node.items() if not (is_call and key == "input")]
    if len(found) > _IDS_AT_MOST:
        raise RequestProblem("too_large", f"body: it names {len(found)} files, allowed are {_IDS_AT_MOST}")
    return tuple(found)


def made_in(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of the files that the provider's own tools, such as code execution, have made for a Message. Only the
    results of these tools tell of them: what the model writes could name anybody's files."""
    found: dict[str, None] = {}
    for block in message["content"]:
        if not (isinstance(block, dict) and str(block.get("type")).endswith("_tool_result")):
            continue
        result = block.get("content")
        outputs = result.get("content") if isinstance(result, dict) else result
        for each in outputs if isinstance(outputs, list) else ():
            if isinstance(each, dict) and isinstance(id := each.get("file_id"), str):
                found[id] = None
    return tuple(found)[:_IDS_AT_MOST]
