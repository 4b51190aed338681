"""The loops, and the stages that they are made of.

Guarantees:
- A loop fits a screen and reads as the algorithm; a stage is one call whose name says what it does.
- Placement (`roles`), the rows of each rank (`dispatch`) and a run's start and end (`run`) are decided below the loops.
- Worker classes run in processes of their own and are named by import path: the controller imports neither megatron-core nor
  SGLang.
"""
