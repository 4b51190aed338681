"""`python -m megarl`: the `megarl` command."""

from megarl.cli.main import program

if __name__ == "__main__":
    program()
