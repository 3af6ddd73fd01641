"""`python -m fa3`: the program fa3, which the package carries; without arguments, `fa3 info`."""

import os
import pathlib
import sys

program = pathlib.Path(__file__).with_name("fa3")
os.execv(program, ["fa3", *(sys.argv[1:] or ["info"])])
