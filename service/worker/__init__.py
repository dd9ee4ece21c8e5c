"""The parts of a worker process put together (`assembly.py`), run (`running.py`), and its health endpoint.

Imported by `demo`, `checks`, `cli` and benchmarks.
"""
