"""What a worker does with a request, from the delivery of its message until the message is acknowledged or returned.

Start at `handler.py`. Imported by `service`; imports `topology`.
"""
