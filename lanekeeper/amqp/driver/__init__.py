"""The lowest layer of a connection: AMQP frames and fields, translation of the library's errors, alarms, URLs,
back-off.

Imported by `lanekeeper/amqp` and `topology/broker` (and the checks of URLs in `service/config`).
"""
