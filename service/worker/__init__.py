"""Creates the parts of a worker process (`assembly.py`) and runs them (`running.py`).

Imported by `demo`, `checks`, `cli` and benchmarks.
"""
