#!/usr/bin/env python
"""Write GSM8K as train.parquet and test.parquet for training: `python -m megarl.data.gsm8k`.

Example: python tools/preprocess_gsm8k.py --source openai/gsm8k --out data/gsm8k
"""

import sys

from megarl.data.gsm8k import main

if __name__ == "__main__":
    sys.exit(main())
