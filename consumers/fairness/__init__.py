"""Decides which tenant's request gets the next free slot of a lane that several tenants use.

Start at `lane_slots.py`. Imported by `pool` and `service/worker`.
"""
