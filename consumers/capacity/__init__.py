"""How many requests a lane works on at a time: slots that are lent and grown, pausing, and what is counted for that.

Imported by `pool`, `handler` and `service/worker`.
"""
