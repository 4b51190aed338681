"""The processes of the roles. The controller names their classes by import path, and imports neither Megatron-core nor SGLang."""
