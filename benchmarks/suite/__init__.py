"""The suite of `./dev bench`: contestants, scenarios, results, and the report."""
