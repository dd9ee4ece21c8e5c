"""Claims, results, counters and budgets, behind the seam `base.py`.

Opened by `opening.py`; imported by everything in `consumers` that keeps something.
"""
