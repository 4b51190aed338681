"""A package of models in SGLang's sense (SGLANG_EXTERNAL_MODEL_PACKAGE): SGLang's processes import the classes that its modules list.

Given one, SGLang leaves its own 190 files of models alone until a model is asked for that the package does not have. To
import them all costs each scheduler 1.4 s of a core and 48 MiB, every time (sglang 0.5.21).
"""
