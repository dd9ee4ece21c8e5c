"""What runs besides single calls of a model: registered Python functions (handlers), and pipelines of steps."""
