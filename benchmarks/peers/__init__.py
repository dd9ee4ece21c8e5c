"""What people use today, each with its worker and its requester. Runs in .cache/bench (requirements-bench.lock)."""
