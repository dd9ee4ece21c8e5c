"""What Lanekeeper declares on the broker, and how it is declared and consumed. Without I/O, except `broker/`."""
