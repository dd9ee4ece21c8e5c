"""`lanekeeper providers list`: what several workers tell, and its text."""

from service.cli.providers import provider_line, told

PAUSE = {"reason": "it refuses the key", "error": "authentication_error 401", "for_s": 30.0, "probe_in_s": 8.0}
BREAKER = {"state": "open", "retry_in_s": 1.5, "error": "overloaded_error 529"}


def test_each_provider_is_told_once_with_what_any_worker_says_of_it() -> None:
    found = told(
        [
            {"worker": "a:1", "providers": ["anthropic", "aws"], "paused": {"anthropic": PAUSE}},
            {
                "worker": "b:1",
                "providers": ["anthropic", "aws"],
                "paused": {"anthropic": {**PAUSE, "for_s": 2.0}},
                "breakers": {"aws claude-haiku-5-5": BREAKER},
            },
            {"worker": "of another version"},
        ]
    )

    assert [each["worker"] for each in found["anthropic"]["paused"]] == ["a:1", "b:1"]
    assert provider_line("anthropic", found["anthropic"]) == (
        "anthropic: paused by 2 of 2 workers, for 30 s: it refuses the key (authentication_error 401); "
        "probed again in 8 s"
    )
    assert provider_line("aws", found["aws"]) == (
        "aws: called by 2 workers; breaker of claude-haiku-5-5: open after overloaded_error 529, asked again in 1.5 s"
    )
