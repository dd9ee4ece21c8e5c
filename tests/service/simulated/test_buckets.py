import pytest

from service.simulated.buckets import Bucket, Limits
from service.simulated.errors import Refusal


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limits(clock: Clock, *, requests: int = 60, tokens: int = 60_000, burst_s: float = 60) -> Limits:
    return Limits(requests=requests, input_tokens=tokens, output_tokens=tokens, burst_s=burst_s, clock=clock)


def test_a_bucket_refills_continuously_up_to_its_size() -> None:
    clock = Clock()
    bucket = Bucket(60, burst_s=60, clock=clock)
    bucket.take(60)

    assert bucket.wait_s(1) == pytest.approx(1.0)
    clock.now_s = 0.5
    assert bucket.level() == pytest.approx(0.5)
    clock.now_s = 1000
    assert bucket.level() == 60


def test_a_burst_of_one_second_enforces_sixty_a_minute_as_one_a_second() -> None:
    clock = Clock()
    bucket = Bucket(60, burst_s=1, clock=clock)
    bucket.take(1)

    assert bucket.wait_s(1) == pytest.approx(1.0)


def test_a_call_beyond_the_limit_gets_a_retry_after() -> None:
    clock = Clock()
    few = limits(clock, requests=2)
    few.enter(10)
    few.enter(10)

    with pytest.raises(Refusal) as caught:
        few.enter(10)

    assert caught.value.status == 429
    assert caught.value.headers["retry-after"] == "30"
    assert caught.value.headers["anthropic-ratelimit-requests-remaining"] == "0"
    clock.now_s = 30
    few.enter(10)


def test_a_refused_call_takes_nothing() -> None:
    clock = Clock()
    few = limits(clock, requests=60, tokens=60)
    few.enter(50)

    for _ in range(5):
        with pytest.raises(Refusal):
            few.enter(50)

    assert few.requests.level() == 59
    assert few.input_tokens.level() == 10


def test_input_tokens_are_settled_and_output_tokens_taken_at_the_end() -> None:
    clock = Clock()
    some = limits(clock)
    some.enter(4000)
    some.settle(input_tokens=-1000, output_tokens=61_000)

    assert some.input_tokens.level() == 57_000
    assert some.output_tokens.level() == -1000
    with pytest.raises(Refusal, match="output tokens"):
        some.enter(10)


def test_headers_have_the_tighter_limit_rounded_to_thousands() -> None:
    clock = Clock()
    some = limits(clock)
    some.enter(12_345)
    headers = some.headers()

    assert headers["anthropic-ratelimit-input-tokens-remaining"] == "48000"
    assert headers["anthropic-ratelimit-output-tokens-remaining"] == "60000"
    assert headers["anthropic-ratelimit-tokens-remaining"] == "48000"
    assert headers["anthropic-ratelimit-requests-limit"] == "60"
    assert headers["anthropic-ratelimit-tokens-reset"] > headers["anthropic-ratelimit-output-tokens-reset"]
    assert headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
