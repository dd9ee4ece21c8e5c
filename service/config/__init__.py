"""Settings: the only reader of the environment, TOML files and options.

Start at `loading.py` (where they come from), then `settings.py` (what there is). Every other folder of `service` may
import it.
"""
