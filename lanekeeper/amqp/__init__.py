"""The connection to RabbitMQ, publishing with confirms, direct replies: for applications, and for our own workers.

Start at `connection.py`. Imported by the client and by `topology/broker`.
"""
