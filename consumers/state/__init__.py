"""Stores claims, results, counters and budgets. The interface `Store` is in `base.py`.

Opened by `opening.py`; imported by everything in `consumers` that keeps something.
"""
