"""`megarl report`: a run folder as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.files import whole_file
from megarl.trainer.report_data import read_run
from megarl.trainer.report_page import page


def run(options: argparse.Namespace) -> None:
    """Write the page, and say where it is.

    Raises:
        ValueError: the folder is no run's, or of one that has not ended a step.
    """
    folder = Path(options.folder)
    output = Path(options.output) if options.output is not None else folder / "report.html"
    text = page(read_run(folder))
    with whole_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{output}: {len(text.encode()) / 1e6:.1f} MB")
