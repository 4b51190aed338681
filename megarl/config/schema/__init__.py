"""The keys of each command, section by section. Every key has a type, a default, and a sentence that the reference prints."""
