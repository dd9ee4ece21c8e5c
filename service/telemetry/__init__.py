"""Logs and traces on their way out of the process, and what is taken out of them before.

Imported by everything in `service`; imports nothing of it.
"""
