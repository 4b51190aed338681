"""The Python API: a training run that a program drives step by step."""
