"""A RabbitMQ of one's own for tests, `./dev` and the demo: from Docker, from an installed server, or installed.

Start at `broker.py`. It imports nothing else of Lanekeeper.
"""
