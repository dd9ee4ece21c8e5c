"""A simulated Anthropic API, as a real HTTP server, with faults on request."""
