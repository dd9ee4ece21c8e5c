"""Answers that are too large for a message are kept outside the broker."""

from consumers.bodies.answers import AnswerBodies
from lanekeeper.contract.messages import BodyAddress


class Recording:
    """A body store that only notes for how long it must keep an answer."""

    def __init__(self) -> None:
        self.kept_s: list[float] = []

    async def keep_answer(self, body: bytes, *, for_s: float) -> BodyAddress:
        self.kept_s.append(for_s)
        return BodyAddress("file:///answer", "0" * 64)


async def test_an_answer_is_kept_an_hour_longer_than_its_result() -> None:
    store = Recording()
    answers = AnswerBodies(store, over_bytes=1, keep_s=86_400)  # type: ignore[arg-type]

    await answers.keep(b"hello", within_s=60)

    assert store.kept_s == [86_400 + 3_600]
