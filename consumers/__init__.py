"""What happens to a request, from a delivery to its settlement.

Start at `handler.py`. Imported by `service`; imports `topology`.
"""
