"""Bytes that a job will hold on each device, and seconds that it takes, by formulas before it runs.

Promises: weights, adapters, gradients and optimizer states follow from the weight tables, to the byte; activations are
the tensors that backward passes keep, listed layer by layer; both are compared with real allocations by tests. Engines'
weights follow from SGLang's table. Operations are counted as torch counts them. Seconds are operations and bytes over assumed
parts of a GPU's peaks: none is measured. Needs no weight and no device. Must not know: process groups, Ray, RL.
"""
