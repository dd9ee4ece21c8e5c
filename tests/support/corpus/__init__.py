"""Malicious requests and answers, each with a name, for tests and fuzzing."""
