"""The arithmetic of a provider's budget: buckets, order, turns. Time is passed in.

Imported by `gates` and `state`; imports nothing else of `consumers`.
"""
