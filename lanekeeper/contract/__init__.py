"""The wire format as typed values: messages, names of headers, exchanges and queues, errors and problem documents.

Imported by everything; imports nothing of ours.
"""
