"""What is said over the wire, typed: messages, headers, bodies, problems.

Imported by everything above `topology/names.py`.
"""
