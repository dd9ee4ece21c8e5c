"""Declaring, verifying and watching the topology, depths, rights, and the management API.

Imported by `service`.
"""
