"""The stores and hosts from which bodies of requests are fetched, as the settings say."""

from consumers.bodies.fetching import Fetching
from consumers.bodies.web import WebBodies
from lanekeeper.bodies import BodyStore
from service.config.settings import Settings

WEB = ("https://", "http://")


def fetching_of(settings: Settings) -> Fetching:
    """The store of large bodies, and the other places that are allowed."""
    spec = settings.bodies
    return Fetching(
        settings.body_store(),
        others=[BodyStore(each) for each in spec.allow if not each.startswith(WEB)],
        web=WebBodies([each for each in spec.allow if each.startswith(WEB)], private=spec.allow_private),
        most_bytes=spec.most_bytes,
    )
