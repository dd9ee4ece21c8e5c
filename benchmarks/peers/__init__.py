"""Other frameworks, each with a worker and a requester. They run in the virtual environment .cache/bench, which is
installed from requirements-bench.lock."""
