"""The names of log lines, spans and metrics, and how spans are written and carried over the wire."""
