"""`lanekeeper demo` and `lanekeeper simulate`, which need no provider: the whole story on one machine, and the
simulated API by itself."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.options import Texts, duration, named
from service.cli.process import FAILED, listening, run

if TYPE_CHECKING:
    from service.config.settings import Settings
    from service.simulated.app import SimulatedAPI

PORT = 8099
NO_LIMIT = 1_000_000_000


@options.with_settings
def demo(settings: "Settings") -> None:
    """Show three promises kept: urgent first, nothing lost, a scarce budget spent in the right order.

    It needs a broker (`./dev demo` starts one), runs simulated providers, and removes at the end what it declared.
    The exit code is 0 only if every act kept its promise."""
    from service.demo import tell_story
    from service.telemetry import logs

    with logs.configured(service="lanekeeper demo", level="error", format="console"):  # the table shows everything else
        is_well = run(tell_story(settings))
    if not is_well:
        raise typer.Exit(FAILED)


def simulate(
    host: Annotated[str, typer.Option("--host", help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="0: any free one.")] = PORT,
    # the defaults of durations are text, because typer parses them too
    latency: Annotated[float, duration("--latency", "How long an answer takes.")] = "0",  # type: ignore[assignment]
    tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Speed of the output, in addition to the latency.")
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Length of every answer; default: an echo.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The only key accepted; default: any.")] = None,
    model: Annotated[Texts, typer.Option("--model", help="A further model's name; can be repeated.")] = None,
    requests_per_minute: Annotated[int, typer.Option(min=1, help="Limit of each model class.")] = 1_000_000,
    input_tokens_per_minute: Annotated[int, typer.Option(min=1, help="Limit of each model class.")] = NO_LIMIT,
    output_tokens_per_minute: Annotated[int, typer.Option(min=1, help="Limit of each model class.")] = NO_LIMIT,
    burst: Annotated[float, duration("--burst", "How much time's worth of a limit its bucket holds.")] = "60s",  # type: ignore[assignment]
    fault: Annotated[
        Texts, named("--fault", "NAME=SHARE", "A fault at random: overloaded=0.1; can be repeated.")
    ] = None,
    batch_time: Annotated[float, duration("--batch-time", "How long a batch takes.")] = "0",  # type: ignore[assignment]
    batch_item_time: Annotated[float, duration("--batch-item-time", "In addition, for each of its requests.")] = "0",  # type: ignore[assignment]
    seed: Annotated[int, typer.Option(help="Seed of the random faults.")] = 0,
) -> None:
    r"""Run a simulated Anthropic API: messages, streams, models, batches, rate limits, and faults.

    OpenAI's chat completions, responses, embeddings and models are there too.

    Markers in a prompt change the answer to this prompt (docs/simulated.md has all markers):

      [\[latency: 10s]]            the answer takes 10 seconds

      [\[tokens: 200]]             the answer has 200 tokens

      [\[fault: overloaded x2]]    the first two calls with this prompt fail; without x2, all calls

    Examples:

      lanekeeper simulate --latency 300ms

      lanekeeper simulate --requests-per-minute 60 --fault overloaded=0.05 --port 0

      ANTHROPIC_BASE_URL=http://127.0.0.1:8099 ANTHROPIC_API_KEY=any lanekeeper serve
    """
    from service.simulated.app import SimulatedAPI, SimulatedOptions
    from service.simulated.batches import BatchOptions
    from service.simulated.faults import parse_share

    try:
        given = SimulatedOptions(
            api_key=api_key,
            models=frozenset(model or ()),
            latency_ms=latency * 1000,
            tokens_per_s=tokens_per_s,
            output_tokens=output_tokens,
            requests_per_minute=requests_per_minute,
            input_tokens_per_minute=input_tokens_per_minute,
            output_tokens_per_minute=output_tokens_per_minute,
            burst_s=burst,
            faults=dict(map(parse_share, fault or ())),
            batches=BatchOptions(processing_s=batch_time, item_s=batch_item_time),
            seed=seed,
        )
        api = SimulatedAPI(given, host=host, port=port)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fault") from None
    run(_simulate(api))


async def _simulate(api: "SimulatedAPI") -> None:
    from service.gateway.server import CannotListen, why_not

    try:
        await api.start()
    except OSError as error:
        text = why_not(error, host=api.host, port=api.port, port_name="--port", host_name="--host")
        raise CannotListen(text) from error
    stopped = asyncio.Event()
    try:
        with listening(stopped.set):
            print(api.base_url, flush=True)
            await stopped.wait()
    finally:
        await api.stop()
