"""The parts ("acts") of `lanekeeper demo`, each of which shows one promise; `story.py` runs them in order.

Only `cli` imports this folder.
"""
