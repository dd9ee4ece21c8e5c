"""How people and processes reach Lanekeeper: worker, command line, demo.

Start at `worker/assembly.py`. This package imports `consumers` and `topology`.
"""
