"""What cannot be: values out of range, keys that do not fit each other, files or devices that are not there."""
