"""How the controller learns that a process died, hangs or raised, and what it says of it."""
