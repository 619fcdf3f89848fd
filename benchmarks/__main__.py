# SPDX-License-Identifier: MIT
"""This is the entry point; the runner is `openmsa.bench`."""

from openmsa.cli.bench import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
