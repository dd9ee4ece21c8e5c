"""Malicious requests and answers, each with a name, for tests, fuzzing and `benchmarks/stalls.py`."""
