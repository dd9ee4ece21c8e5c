"""The HTTP server of a process: health, and Anthropic's `POST /v1/messages` through the lanes. Start at `server.py`.

Imported by `cli`, `demo` and benchmarks.
"""
