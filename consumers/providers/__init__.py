"""Calls model providers. No other code imports their client libraries.

Start at `registry.py`. Imported by `handler`.
"""
