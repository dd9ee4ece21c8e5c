"""Generates the OpenAPI and AsyncAPI documents that describe Lanekeeper's interfaces, from the code that checks and
sends the messages.

`app.py` imports this folder.
"""
