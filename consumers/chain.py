"""The providers that may be called for a request, best first. `providers/routes.py` makes this value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider that may be called."""

    provider: str
    model: str
    """Anthropic's name for it, which is also used in the table of prices."""
    name: str
    """The provider's name for the model."""
    account: str
    """The account whose budget it uses: a provider has one account for each class of models."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The routes of one request, at least one unless its model is forbidden."""

    routes: tuple[Route, ...] = ()
    forbidden: str = ""
    """Why the model may not be used here: the detail of the problem `forbidden_model`."""

    def since(self, route: Route) -> tuple[Route, ...]:
        """The given route and the routes after it in the chain."""
        return self.routes[self.routes.index(route) :]
