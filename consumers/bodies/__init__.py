"""Fetches request bodies that are not in the message but at an allowed address."""
