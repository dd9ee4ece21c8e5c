"""Fetches the bodies of requests that lie beside the broker, from the stores and hosts that are allowed."""
