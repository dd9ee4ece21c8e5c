"""Settings: the only reader of the environment, TOML files and options.

Start at `settings.py`. Every other folder of `service` may import it.
"""
