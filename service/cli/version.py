"""Which Lanekeeper this is."""

from importlib.metadata import PackageNotFoundError, version


def lanekeeper_version() -> str:
    """The version of the installed distribution; unknown in a checkout that is not installed."""
    try:
        return version("lanekeeper")
    except PackageNotFoundError:
        return "0+checkout"
