"""Provider batches: requests of a lane that are answered together, at half the price, each to its own requester.

`gather.py` collects requests into a ticket, `ticket.py` is the ticket's form on the broker, `collect.py` submits its
batch and brings each result back to its request's lane.
"""
