"""Starts a private RabbitMQ for tests, `./dev` and the demo: in Docker, or with an installed server.

Start at `broker.py`. Of Lanekeeper, this folder imports only `lanekeeper.contract.problems`.
"""
