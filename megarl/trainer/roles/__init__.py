"""The worker groups of a run, the memory on their devices, and the sync of their weights."""
