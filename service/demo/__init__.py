"""`lanekeeper demo`: `story.py` runs the acts of `acts.py` in order, each of which shows one promise."""
