"""The arithmetic of a provider's budget: buckets, lines of waiting requests, turns. Time is passed in.

Imported by `gates` and `state`; imports nothing else of `consumers`.
"""
