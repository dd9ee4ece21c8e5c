from typing import Any

from lanekeeper import Rejected


def count(request: Any) -> dict[str, int]:
    if not isinstance(request, dict) or not isinstance(text := request.get("text"), str):
        raise Rejected('the input is {"text": "…"}')
    return {"words": len(text.split())}
