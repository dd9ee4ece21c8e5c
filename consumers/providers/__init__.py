"""Calls to model providers, and the only code that imports their clients.

Start at `registry.py`. Imported by `handler`.
"""
