"""The programs of Lanekeeper: the worker process, the HTTP gateway, the command line, the demo.

Start at `worker/assembly.py`. This package imports `consumers` and `topology`.
"""
