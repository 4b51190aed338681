"""Tiny models and tasks to try megarl with: for `megarl make-task`, the demo and the tests; nothing that trains imports them.

The folder lies outside of the package. A wheel has it in `megarl/share/examples`; `megarl.util.packages.example` loads a module of it
in either place.
"""
