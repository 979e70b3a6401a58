"""Packages that only parts of deepmoe need, and `pip install deepmoe` alone does not bring."""

from importlib.util import find_spec

from deepmoe.errors import UserError


def require(extra: str, *packages: str) -> None:
    """Tells what to install where a package is missing.

    Args:
        extra: that brings the packages.
        packages: as they are imported.

    Raises:
        UserError: where one is missing.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(f"this needs {missing[0]}: pip install 'deepmoe[{extra}]'")
