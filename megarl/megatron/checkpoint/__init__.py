"""A rank's state in distributed checkpoints: saved in any layout, loaded in any other."""
