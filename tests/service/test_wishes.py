"""What a request says beside its body."""

from service.wishes import Wishes, bound_s, message_of


def test_a_tenant_is_said_with_the_user_that_the_broker_checks() -> None:
    own = message_of({}, Wishes(tenant="crm"), stream=False, user="crm")
    other = message_of({}, Wishes(tenant="acme"), stream=False, user="crm")
    nobody = message_of({}, Wishes(), stream=False, user="crm")

    assert (own.user_id, own.headers.get("x-lane-tenant")) == ("crm", None)
    assert (other.user_id, other.headers.get("x-lane-tenant")) == ("crm", "acme")
    assert (nobody.user_id, nobody.headers.get("x-lane-tenant")) == (None, None)


def test_an_answer_is_awaited_until_a_little_after_its_deadline_if_it_has_one() -> None:
    def awaited_s(**wishes: float) -> float | None:
        return bound_s(message_of({}, wishes, stream=False, user="crm"))  # type: ignore[arg-type]

    assert awaited_s() is None
    assert awaited_s(deadline_s=10) == 15
    assert awaited_s(deadline_s=10, delay_s=2) == 17
