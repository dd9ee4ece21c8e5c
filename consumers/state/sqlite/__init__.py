"""The store in a file, for the processes of one machine. Start at `store.py`."""
