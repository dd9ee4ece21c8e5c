"""The wire format as typed values: messages, names of headers, exchanges and queues, errors and problem documents.

Every other package of Lanekeeper may import it; it imports none of them.
"""
