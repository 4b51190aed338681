"""Things that any room may need: files that are complete or absent, plugins, signals, spans, packages."""
