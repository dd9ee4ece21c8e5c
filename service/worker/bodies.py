"""Creates, from the settings, the part that fetches bodies of requests, and the part that keeps large answers."""

from consumers.bodies.answers import AnswerBodies
from consumers.bodies.fetching import Fetching
from consumers.bodies.web import WebBodies
from lanekeeper.bodies import BodyStore
from service.config.bodies_section import WEB
from service.config.settings import Settings


def fetching_of(settings: Settings, own: BodyStore | None) -> Fetching:
    """Create the part of a worker that fetches large bodies of requests: from `own`, the store for large bodies, and
    from the places in `LANEKEEPER_BODIES__ALLOW`."""
    spec = settings.bodies
    return Fetching(
        own,
        others=spec.allowed_stores(),
        web=WebBodies([url for url in spec.allow if url.startswith(WEB)], private=spec.allow_private),
        most_bytes=spec.most_bytes,
    )


def answers_of(settings: Settings, own: BodyStore | None) -> AnswerBodies | None:
    """Create the part of a worker that puts large answers into `own`, the store for large bodies; None if there is no
    such store."""
    if own is None:
        return None
    return AnswerBodies(own, over_bytes=settings.bodies.answers_over_bytes, keep_s=settings.results.keep_s)
