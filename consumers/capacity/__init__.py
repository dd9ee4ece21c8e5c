"""How many requests a lane works on at a time: lends and adds slots, pauses all work, and counts what that needs.

Imported by `pool`, `handler` and `service/worker`.
"""
