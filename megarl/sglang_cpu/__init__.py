"""What SGLang needs on a machine without a GPU. It imports nothing here: torch's import loads `hooks` from this package."""
