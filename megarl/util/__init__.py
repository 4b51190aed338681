"""What any room may need: files that are whole or not there, plugins, signals, spans, packages."""
