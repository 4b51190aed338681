"""The folders that come with megarl beside its modules: `recipes`, `launch`, `requirements`."""

from pathlib import Path


def shipped() -> Path:
    """The folder that they are in: of an installed wheel `megarl/share`, of a clone its top level."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "share"
    return installed if installed.is_dir() else package.parent
