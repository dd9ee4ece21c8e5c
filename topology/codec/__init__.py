"""What a worker reads: from a delivered message to a request; its headers, its body, their bounds.

Start at `decoding.py`. Imported by `consumers` and `service`.
"""
