"""Whose request is next where tenants share a lane.

Start at `turns.py`. Imported by `pool` and `service/worker`.
"""
