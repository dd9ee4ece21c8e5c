"""The contract for machines: OpenAPI and AsyncAPI documents, made of what checks and sends the messages.

Imported by `app.py`.
"""
