"""Where the batches of a loop come from: collected when a step begins, one step ahead, or out of a stream of responses."""
