"""Stores claims, results, counters and budgets. The interface `Store` is in `base.py`.

`opening.py` opens a store. Imported by all of `consumers` that stores something.
"""
