"""Tiny models and tasks to try megarl with: `megarl make-task`, the demo, the tests. Nothing that trains imports them."""
