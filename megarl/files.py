"""Files that are there whole or not at all, and errors that say which file could not be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to: it takes the place of `path` if the block ends without an error.

    Raises:
        OSError: as `naming`; `path` is then as it was before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name `path` in errors of the file system: a write to a full disk fails without saying of what."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # such as a TimeoutError of ours: nothing of the file system's
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
