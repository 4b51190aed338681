"""Runs and plans as HTML pages, each one file that works without a network.

Reads run folders and the trainer's facts of a plan; writes nothing but its page, starts nothing and trains nothing. `data` reads
a run folder, `curves` and `phases` make charts of it as plain data, `summary` its final numbers and the differences
between runs, `page` fills the templates. The charts are drawn in the browser by `templates/report.js` with Plotly.

Guarantee of a page: nothing is fetched and no text of a model, a data set or a configuration becomes markup or a script (autoescaping
templates, and a content security policy that allows the page's own scripts by their hashes and nothing from elsewhere).
"""
