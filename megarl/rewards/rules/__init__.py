"""The reward rules that come with megarl, by data source."""
