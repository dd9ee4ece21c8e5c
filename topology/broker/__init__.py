"""What a worker does on a connection to RabbitMQ besides publishing: it consumes queues, and publishes events.

Start at `deliveries.py`; connection and publisher are in `lanekeeper/amqp`. Imported by `consumers` and `service`.
"""
