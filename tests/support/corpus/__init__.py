"""Requests and answers that are made to do harm, each under a name: for tests, fuzzing and `benchmarks/stalls.py`."""
