"""`megarl plan`: the memory, the seconds and the weight syncs of a job before it runs."""
