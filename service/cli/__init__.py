"""The command line: one file for each command.

Start at `main.py`. No other folder imports this one.
"""
