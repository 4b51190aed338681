"""First tests of a machine with a GPU: steps that end within minutes, each in a process of its own, and one record of them.

The steps need no network: weights are made here, at random, in the shapes of real models. A step that fails, hangs or cannot run here
is reported, and the others run nonetheless. The code that needs a GPU is in the steps' own modules; planning, running, recording and comparing
do not, and are tested without one.
"""
