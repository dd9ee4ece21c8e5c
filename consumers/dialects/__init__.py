"""What Lanekeeper knows of the APIs whose bodies it passes on. Each dialect is a table of functions (`base.Dialect`);
nothing is translated from one to another, and nothing else in Lanekeeper knows the fields of an answer.

What is read of a request's body is in `topology/codec/bodies.py`.
"""

from collections.abc import Mapping
from typing import Final

from consumers.dialects.anthropic import MESSAGES
from consumers.dialects.base import Dialect
from consumers.dialects.openai_chat import CHAT
from consumers.dialects.openai_embeddings import EMBEDDINGS
from consumers.dialects.openai_responses import RESPONSES

DIALECTS: Final[Mapping[str, Dialect]] = {each.name: each for each in (MESSAGES, CHAT, RESPONSES, EMBEDDINGS)}
"""By the name in the header `x-lane-dialect`."""
