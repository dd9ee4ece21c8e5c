"""The only code that speaks to RabbitMQ.

Start at `connection.py`, `publisher.py` and `deliveries.py`. Imported by `consumers` and `service`.
"""
