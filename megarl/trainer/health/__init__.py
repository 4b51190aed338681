"""Whether a run is healthy: what its metrics say, and what to do about it."""
