"""Small tables on their way between processes, as one array of bytes: Arrow's own stream format.

Ray (2.60) pickles a table column by column and looks for modules meanwhile, which for the small tables that rollouts are made of takes
many times as long as to copy them. Large ones it passes on without a copy: those are left to it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class SentTable:
    """A table of `num_rows`; `data` [bytes] is uint8, which Ray writes and reads in place."""

    num_rows: int
    data: np.ndarray


def sent(value: Any) -> Any:
    """A table as `SentTable`, anything else as it is."""
    if not isinstance(value, pa.Table):
        return value
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, value.schema) as writer:
        writer.write_table(value)
    return SentTable(value.num_rows, np.frombuffer(sink.getvalue(), np.uint8))


def received(value: Any) -> Any:
    """What `sent` was given; a table's columns lie in `data`."""
    if not isinstance(value, SentTable):
        return value
    with pa.ipc.open_stream(pa.py_buffer(value.data)) as reader:
        return reader.read_all()
