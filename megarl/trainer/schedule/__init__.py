"""The source of a loop's batches: collected when a step begins, one step ahead, or from a stream of responses."""
