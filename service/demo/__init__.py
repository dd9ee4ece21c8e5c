"""The acts of `lanekeeper demo`; `story.py` runs them in order.

Only `cli` imports this folder.
"""
