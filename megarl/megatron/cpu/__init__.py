"""Stand-ins for the CUDA kernels of Megatron's layers and optimizer, in plain torch."""
