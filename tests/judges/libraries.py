"""`python libraries.py URL`: makes calls with LangChain and LlamaIndex, of which only the base URL is changed, and
prints what each got. `vercel/judge.js` does the same with the Vercel AI SDK.

Runs in the environment of requirements-libraries.lock."""

import json
import sys
from collections.abc import Callable
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"
MODEL, EMBEDDING_MODEL = "gpt-4o", "text-embedding-3-small"


class Place(BaseModel):
    """A place."""

    at: str


def langchain(model: str = MODEL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=URL, api_key="sk-any", max_retries=0, **more)


def llama_index() -> OpenAI:
    return OpenAI(model=MODEL, api_base=URL, api_key="sk-any", max_retries=0)


def langchain_embeddings() -> OpenAIEmbeddings:
    # counting tokens would download a vocabulary
    return OpenAIEmbeddings(model=EMBEDDING_MODEL, base_url=URL, api_key="sk-any", check_embedding_ctx_length=False)


def langchain_usage() -> Any:
    whole = None
    for chunk in langchain(stream_usage=True).stream("a story"):
        whole = chunk if whole is None else whole + chunk
    return None if whole is None else [whole.content, whole.usage_metadata]


def llama_index_stream() -> Any:
    *_, last = llama_index().stream_chat([ChatMessage(role="user", content="a story")])
    return last.message.content


CALLS: dict[str, Callable[[], Any]] = {
    "LangChain: invoke": lambda: langchain().invoke("tell me “a story” 🦊").content,
    "LangChain: usage": lambda: langchain().invoke("a story").usage_metadata,
    "LangChain: stream": lambda: [chunk.content for chunk in langchain().stream("a story")],
    "LangChain: stream with usage": langchain_usage,
    "LangChain: tool": lambda: langchain().bind_tools([Place]).invoke("where").tool_calls,
    "LangChain: structured": lambda: langchain().with_structured_output(Place).invoke("here").at,
    "LangChain: batch": lambda: [each.content for each in langchain().batch(["one", "two", "three"])],
    "LangChain: responses": lambda: langchain(use_responses_api=True).invoke("a story").text,
    "LangChain: embeddings": lambda: [vector[:4] for vector in langchain_embeddings().embed_documents(["a", "b"])],
    "LangChain: unknown model": lambda: langchain("nobody").invoke("x"),
    "LlamaIndex: complete": lambda: llama_index().complete("a story").text,
    "LlamaIndex: chat": lambda: llama_index().chat([ChatMessage(role="user", content="a story")]).message.content,
    "LlamaIndex: stream": llama_index_stream,
    "LlamaIndex: structured": lambda: llama_index().as_structured_llm(Place).complete("here").raw.at,
    "LlamaIndex: embeddings": lambda: [
        vector[:4]
        for vector in OpenAIEmbedding(model=EMBEDDING_MODEL, api_base=URL, api_key="sk-any").get_text_embedding_batch(
            ["a", "b"]
        )
    ],
}


def made(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None), getattr(error, "code", None)]


print(json.dumps({name: made(call) for name, call in CALLS.items()}, default=str))
