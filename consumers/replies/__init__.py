"""Sends replies: the parts of a stream, the final reply, and the final reply again if its queue refused it."""
