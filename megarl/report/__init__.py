"""Runs and plans as HTML pages, each one file that works without a network.

Reads run folders and what the trainer knows of a plan; writes nothing but its page, starts nothing and trains nothing. `data` reads
a run folder, `curves`, `seconds` and `memory` make charts of it as plain data, `tiles` its final numbers, `compare` what
differs between runs, `page` fills the templates. The charts are drawn in the browser by `templates/report.js` with Plotly.

What a page guarantees: nothing is fetched and no text of a model, a data set or a configuration becomes markup or a script (autoescaping
templates, and a content security policy that allows the page's own scripts by their hashes and nothing from elsewhere).
"""
