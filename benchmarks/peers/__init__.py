"""Other frameworks, each with its worker and its requester. They run in .cache/bench (requirements-bench.lock)."""
