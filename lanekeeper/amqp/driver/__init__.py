"""Below a connection: AMQP frames and fields, errors of the library as ours, alarms, URLs, back-off.

Imported by `lanekeeper/amqp` and `topology/broker` (and the checks of URLs in `service/config`).
"""
