"""The suite of `./dev bench`: contestants, scenarios, what was measured, and the report."""
