"""The wire format as typed values: messages, names of headers, exchanges and queues, errors and problem documents."""
