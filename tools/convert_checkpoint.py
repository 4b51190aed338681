#!/usr/bin/env python
"""Convert a checkpoint between Hugging Face's and Megatron's format, or merge adapters: `megarl convert` as a script.

Example: python tools/convert_checkpoint.py Qwen2.5-7B-Instruct Qwen2.5-7B-Instruct-megatron
"""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
