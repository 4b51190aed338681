"""The loops, and the stages that they are made of.

Promises: a loop fits a screen and reads as the algorithm; a stage is one call that names what it does; where
things run (`roles`), how rows reach ranks (`dispatch`) and how a run ends whole (`run`) is decided below the
loops. Worker classes run in their own processes and are named by import path, so that the controller imports
neither megatron-core nor SGLang.
"""
