"""The answer on its way to the requester, its parts before it, and what is told again when nobody took it.

Start at `reply.py`. Imported by `handler`, `settle` and `control`.
"""
