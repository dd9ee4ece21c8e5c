"""The contract for machines: OpenAPI and AsyncAPI documents, made from the code that checks and sends the messages.

`app.py` imports this folder.
"""
