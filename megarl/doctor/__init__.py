"""What can be known to be wrong before a run starts: its keys, its data, its models, its machines and their links."""
