"""The stages of a step. Each is one call whose name says what it does."""
