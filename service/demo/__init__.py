"""The acts of `lanekeeper demo`; `story.py` runs them in order.

Imported by `cli` alone.
"""
