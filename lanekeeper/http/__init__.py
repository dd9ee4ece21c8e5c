"""Calls to a gateway: repeats them if that may help, and turns answers into the same values and errors as over AMQP.

Used by `lanekeeper.over_http`.
"""
