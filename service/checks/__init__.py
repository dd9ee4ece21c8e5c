"""The checks of `lanekeeper check`, the figures of `lanekeeper status`, and the rules of the production profile.

Start at `run.py`. `cli` imports this folder.
"""
