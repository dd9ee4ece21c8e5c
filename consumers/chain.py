"""Who may be asked for a request, best first. Found once (`providers/routes.py`), and kept as a value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider that may be called."""

    provider: str
    model: str
    """As Anthropic calls it, and the tables of prices do."""
    name: str
    """As the provider calls it."""
    account: str
    """Whose budget it uses: the provider's for this class of models."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The routes of one request, at least one unless its model is forbidden."""

    routes: tuple[Route, ...] = ()
    forbidden: str = ""
    """Why the model may not be used here: the detail of the problem `forbidden_model`."""

    def since(self, route: Route) -> tuple[Route, ...]:
        """The route, then those that may be asked instead of it."""
        return self.routes[self.routes.index(route) :]
