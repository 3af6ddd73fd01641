"""The course's small C programs: compiled and run when it is built, and what they print is shown."""

import functools
import html
import os
import pathlib
import subprocess
import tempfile

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"


@functools.cache
def printed(name, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / name
        flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, *flags, "-o", program, PROGRAMS / f"{name}.c", "-lm"], check=True
        )
        done = subprocess.run(
            [program, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout


def run(name, *arguments):
    command = " ".join([f"programs/{name}.c", *arguments])
    return (
        f'<figure class="code"><pre class="scroll" tabindex="0" role="group" '
        f'aria-label="Output of {command}"><samp>{html.escape(printed(name, *arguments))}</samp>'
        f"</pre><figcaption>What docs/site/{command} prints.</figcaption></figure>"
    )
