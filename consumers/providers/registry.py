"""Which provider is called, under one CLIENT span an attempt."""

from consumers.providers.base import Answer, Parts, Provider
from topology import recording
from topology.contract.messages import Request
from topology.tracing import Tracing


class Registry:
    """The providers of this process. One, so far."""

    def __init__(self, provider: Provider, *, tracing: Tracing) -> None:
        self._provider = provider
        self._tracing = tracing

    async def stream(self, request: Request, *, timeout_s: float, parts: Parts | None) -> Answer:
        """Make one attempt; as `Provider.stream`."""
        with self._tracing.chat(
            model=request.model, provider=self._provider.name, stream=parts is not None, max_tokens=request.max_tokens
        ) as span:
            answer = await self._provider.stream(request, timeout_s=timeout_s, parts=parts)
            recording.answer(
                span,
                model=answer.model,
                input_tokens=answer.usage.input_tokens,
                output_tokens=answer.usage.output_tokens,
                cache_read_tokens=answer.usage.cache_read_input_tokens,
                cache_write_tokens=answer.usage.cache_creation_input_tokens,
                stop_reason=answer.stop_reason,
                request_id=answer.request_id,
            )
            return answer
