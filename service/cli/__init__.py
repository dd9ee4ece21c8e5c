"""The command line: one file for each command.

Start at `main.py`. Nothing imports it.
"""
