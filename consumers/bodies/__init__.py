"""Fetches bodies of requests that lie in a store or on a host, if that place is allowed; keeps large answers."""
