"""Creates, from the settings, the part that fetches bodies of requests."""

from consumers.bodies.fetching import Fetching
from consumers.bodies.web import WebBodies
from lanekeeper.bodies import BodyStore
from service.config.bodies_section import WEB
from service.config.settings import Settings


def fetching_of(settings: Settings, own: BodyStore | None) -> Fetching:
    """Create the part of a worker that fetches large bodies of requests: from `own`, the store for large bodies, and
    from the places in `LANEKEEPER_BODIES__ALLOW`."""
    spec = settings.bodies
    web = WebBodies([url for url in spec.allow if url.startswith(WEB)], private=spec.allow_private)
    return Fetching(own, others=[*spec.allowed_stores(), web], most_bytes=spec.most_bytes)
