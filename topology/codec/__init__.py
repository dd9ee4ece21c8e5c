"""Turns a delivered message into a request: reads and checks its headers and its body, and limits their size."""
