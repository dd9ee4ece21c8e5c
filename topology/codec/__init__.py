"""Turns a delivered message into a request: its headers, its body, and the bounds of both.

Start at `decoding.py`. Imported by `consumers` and `service`.
"""
