"""A run: its folder, its cluster, its log, its checkpoints, and its end."""
