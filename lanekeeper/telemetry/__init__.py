"""The names of log lines, spans and metrics, and how spans are written and carried over the wire.

May be imported by all packages except `lanekeeper/contract`.
"""
