"""Consuming, inboxes and events: what a worker does on a connection besides publishing.

Start at `connection.py`, `publisher.py` and `deliveries.py`. Imported by `consumers` and `service`.
"""
