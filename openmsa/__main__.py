# SPDX-License-Identifier: MIT
"""``python -m openmsa`` runs the command line where the installed command is not on the path."""

from openmsa.cli import app

app(prog_name="openmsa")
