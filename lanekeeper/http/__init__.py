"""Calls to a gateway: repeated where that helps, their answers as the values and errors that AMQP gives.

Imported by `lanekeeper.over_http`.
"""
