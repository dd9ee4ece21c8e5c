"""How many requests a lane works on at a time: slots that are lent and added, pauses, and the counts for both.

Imported by `pool`, `handler` and `service/worker`.
"""
