"""Problems that can be found before a run starts, in its keys, its data, its models, its machines and their links."""
