"""Versions of this package and of installed ones."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.3.0"


def installed_version(package: str) -> str:
    """The version of an installed package; "" if there is none. Does not import it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
