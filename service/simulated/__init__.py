"""A simulated Anthropic API, and OpenAI's, as a real HTTP server, with faults on request."""
