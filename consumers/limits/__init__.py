"""Computes when a request may use a provider's budget: token buckets, lines of waiting requests. Without I/O or clock.

Imported by `gates` and `state`; imports nothing else of `consumers`.
"""
