"""What is on the broker, and how it is declared and consumed. Pure, except `broker/`.

Start at `declaration.py`. Imported by `consumers` and `service`; imports neither.
"""
