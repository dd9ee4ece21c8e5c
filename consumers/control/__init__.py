"""Control messages: cancel, result, status.

Start at `queue.py`. Imported by `service/worker`.
"""
