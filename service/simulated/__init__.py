"""A simulated Anthropic API, as a real HTTP server, with faults on request.

Imported by `demo`, `cli` and tests.
"""
