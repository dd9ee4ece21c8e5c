"""Defines `Chain`, the list of the providers that may be called for a request, in order of preference.
`providers/routes.py` creates it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider that may be called for a request, and the model that is requested from it."""

    provider: str
    model: str
    """Anthropic's name for the model, which the table of prices uses too."""
    name: str
    """The provider's own name for the model, which the call contains."""
    account: str
    """The account against whose rate limits the call counts. A provider has one account for each class of models."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The providers that may be called for one request, in order of preference. There is at least one, unless the
    request's model is forbidden."""

    routes: tuple[Route, ...] = ()
    forbidden: str = ""
    """The text of the error `forbidden_model`, which says why the request's lane or tenant may not use the requested
    model; "" if the model is allowed."""

    def starting_at(self, route: Route) -> tuple[Route, ...]:
        """The given route (a provider and model) and those after it in the chain."""
        return self.routes[self.routes.index(route) :]
