"""Fetches bodies of requests that are not in the message but in a store or on a host, if that place is allowed."""
