"""Which Lanekeeper this is."""

from importlib.metadata import PackageNotFoundError, version


def lanekeeper_version() -> str:
    """As the distribution has it; a checkout that nobody installed has none."""
    try:
        return version("lanekeeper")
    except PackageNotFoundError:
        return "0+checkout"
