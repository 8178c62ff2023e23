"""`vllm bench serve`, in the environment of vLLM: ``python vllm_load.py FLAGS``.

The command `vllm` looks for a package of that name, and the build for CPUs has another one.
"""

import argparse
import importlib
import sys


def main() -> int:
    """0 when the run was made."""
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = argparse.ArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
