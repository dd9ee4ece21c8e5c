"""How people and processes reach Lanekeeper: worker, client, command line, demo.

Start at `worker/assembly.py`. It imports `consumers` and `topology`.
"""
