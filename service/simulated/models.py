"""The models that the simulated API knows, and their classes: models of one class share a rate limit."""

from typing import Any, Final

from service.simulated.errors import Refusal

KNOWN: Final = (
    "claude-fable-5-2",
    "claude-fable-5-1",
    "claude-fable-5",
    "claude-mythos-5-2",
    "claude-mythos-5-1",
    "claude-mythos-5",
    "claude-opus-5-5",
    "claude-opus-5",
    "claude-opus-4-8",
    "claude-opus-4-7",
    "claude-opus-4-6",
    "claude-opus-4-5",
    "claude-sonnet-5-5",
    "claude-sonnet-5",
    "claude-sonnet-4-6",
    "claude-sonnet-4-5",
    "claude-haiku-5-5",
    "claude-haiku-4-5",
)
_OTHER: Final = "other"
LIMIT_CLASSES: Final = ("fable", "mythos", "opus", "sonnet", "haiku", _OTHER)


def limit_class(model: str) -> str:
    """The name of the class of models that share one rate limit with this model: `opus`, `sonnet`, … if the model's
    name contains that word, else `other`."""
    return next((name for name in LIMIT_CLASSES if name in model), _OTHER)


def info(model: str) -> dict[str, Any]:
    """The JSON answer of the simulated `GET /v1/models/{id}`."""
    return {
        "type": "model",
        "id": model,
        "display_name": model.replace("-", " ").title(),
        "created_at": "2026-01-01T00:00:00Z",
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": 200_000,
        "max_tokens": 128_000,
    }


def page(models: list[str]) -> dict[str, Any]:
    """The JSON answer of the simulated `GET /v1/models`: all models on one page."""
    return {
        "data": [info(model) for model in models],
        "has_more": False,
        "first_id": models[0] if models else None,
        "last_id": models[-1] if models else None,
    }


def unknown(model: str) -> Refusal:
    """The error 404 for an unknown model."""
    return Refusal(404, f"model: {model[:100]}", outcome="unknown_model")
