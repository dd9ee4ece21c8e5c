"""What `lanekeeper check` and `lanekeeper status` look at, and what a production profile refuses.

Start at `run.py`. Imported by `cli`.
"""
