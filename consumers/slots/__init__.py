"""Who gets a lane's next slot (the right to work on one request): lanes, tenants, lending, scaling, pauses, watchdog.

Start at `admission.py`.
"""
