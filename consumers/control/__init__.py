"""Answers control messages, with which clients cancel a request, fetch a result or ask for a worker's status, and
operators pause and resume."""
