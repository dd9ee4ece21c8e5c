"""Whose request is next where tenants share a lane.

Start at `lane_slots.py`. Imported by `pool` and `service/worker`.
"""
