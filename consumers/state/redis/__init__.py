"""The store in Redis, for workers on several machines. Start at `store.py`."""
