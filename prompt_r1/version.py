"""The version of this package: of `--version`, and of the wheel."""

__version__ = "0.1.0"
