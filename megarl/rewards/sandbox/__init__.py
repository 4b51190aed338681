"""Programs of a model, run where they can do no harm.

`sandbox` sends a request to a process of its own in which `jail.main` runs: it sets up the common part of all tests, then runs
each test in a child, and writes the results to its standard output.

A program has one process with threads, `memory_mb` of memory, `seconds` of time for a test, its input, up to
OUTPUT_BYTES of output, no environment. It has no socket and can start, signal or watch no other process: the kernel refuses
the system calls (`seccomp`). Its files, as `isolation` says:
- "namespaces": Python's own and /usr to read, and 16 MiB in /tmp to write, which is gone afterwards; nothing else is there.
- "seccomp": every file that the user of megarl can read, nothing to write.

It does not stop a program from claiming, by a search of the interpreter's frames, that it passed assertions, because these run
in its own process. Printed and returned values are compared outside.

bubblewrap (0.8 was tried) could replace `namespaces` alone, and only where an administrator has installed it: the refused
system calls, the limits and a child for each test would remain, and so would `namespaces` for all other machines.

This room must not know: anything but the standard library, for the jail runs with nothing else.
"""
