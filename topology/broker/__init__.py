"""Consuming, inboxes and events: what a worker does on a connection besides publishing.

Start at `deliveries.py`; connection and publisher are in `lanekeeper/amqp`. Imported by `consumers` and `service`.
"""
