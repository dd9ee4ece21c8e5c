"""How people and processes reach Lanekeeper: worker, command line, demo.

Start at `worker/assembly.py`. It imports `consumers` and `topology`.
"""
