"""Declares, checks and watches Lanekeeper's exchanges and queues; checks permissions; calls the management API.

Imported by `service`.
"""
