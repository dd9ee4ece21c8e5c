"""The connection to RabbitMQ, publishing with confirms, direct replies: for applications, and for our own workers."""
