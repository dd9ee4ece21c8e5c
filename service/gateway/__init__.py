"""The HTTP server of a process: health, Anthropic's `POST /v1/messages`, and `/v1/requests`. Start at `server.py`."""
