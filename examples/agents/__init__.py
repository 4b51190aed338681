"""Agents of published frameworks, as they are, and tasks small enough that a tiny model learns them on a CPU (docs/agents.md)."""
