"""`python -m megarl`: the `megarl` command."""

from megarl.cli import program

if __name__ == "__main__":
    program()
