"""From YAML files and overrides to a typed configuration. Every problem is told at once, with the place where the value was written."""
