import pytest

from service.simulated.faults import NO_SCRIPT, Fault, Faults


def test_a_fault_is_parsed_with_its_parameters() -> None:
    parse = Faults({}, seed=0).read
    assert parse("overloaded x3") == Fault(name="overloaded", times=3)
    assert parse("rate_limited retry_after=2 x1") == Fault(name="rate_limited", given={"retry_after": "2"}, times=1)


@pytest.mark.parametrize("text", ["", "nothing", "reset", "overloaded x0", "overloaded 2", "overloaded depth=3"])
def test_a_malformed_fault_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError):
        Faults({}, seed=0).read(text)


def test_the_same_seed_gives_the_same_faults_in_the_given_shares() -> None:
    def names(seed: int) -> list[str]:
        faults = Faults({"overloaded": 0.2, "server_error": 0.1}, seed=seed)
        chosen = [faults.choose(NO_SCRIPT, "") for _ in range(2000)]
        return [fault.name if fault else "" for fault in chosen]

    first = names(1)

    assert first == names(1) != names(2)
    assert 0.16 < first.count("overloaded") / 2000 < 0.24
    assert 0.07 < first.count("server_error") / 2000 < 0.13
