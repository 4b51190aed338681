"""Configurations that are refused: values out of range, keys that contradict each other, missing files or devices."""
