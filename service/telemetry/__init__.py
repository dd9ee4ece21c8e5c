"""Writes logs and sends traces, after secrets and content were removed from them.

All folders of `service` may import this one; it imports none of them.
"""
