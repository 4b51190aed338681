"""The stages of a step. Each is one call that names what it does."""
