"""Warning where `marin-fray`, which provides the package `fray` too, is installed over Fray, or under it."""

from __future__ import annotations

import warnings
from pathlib import Path


def warn_of_marin_fray(package: Path) -> None:
    """Warn if `marin-fray` was installed into the directory of the package ``fray``: then each has files of the other.

    A Fray that comes earlier on the path, such as a checkout, is not affected.
    """
    # The directory alone: the metadata of all packages takes longer to read than `fray.v2` to import.
    if next(package.parent.glob("marin_fray-*.dist-info"), None) is not None:
        warnings.warn(
            f"marin-fray is installed in {package} too, so that each has overwritten files of the other; to have Fray: "
            "pip uninstall --yes marin-fray && pip install --force-reinstall --no-deps fray",
            RuntimeWarning,
            stacklevel=3,
        )
