"""What a worker does on a connection to RabbitMQ besides publishing: it consumes queues, and publishes events."""
