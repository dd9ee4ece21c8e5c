"""The parts of a worker process put together (`assembly.py`) and run (`running.py`).

Imported by `demo`, `checks`, `cli` and benchmarks.
"""
