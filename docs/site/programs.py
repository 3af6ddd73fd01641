"""What programs print. The course's small C programs are compiled and run when it is built; those of
worklog/tools need a GPU, and what they printed there is kept beside them."""

import functools
import html
import os
import pathlib
import subprocess
import tempfile

import figures

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
ROOT = PROGRAMS.parent.parent.parent


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


def show(command, text, caption):
    return (
        f'<figure class="code"><pre class="scroll" tabindex="0" role="group" '
        f'aria-label="Output of {command}"><samp>{html.escape(text)}</samp>'
        f"</pre><figcaption>{caption}</figcaption></figure>"
    )


def run(name, *arguments):
    command = " ".join([f"programs/{name}.c", *arguments])
    return show(command, printed(name, *arguments), f"What docs/site/{command} prints.")


def tool(name):
    """What a program of worklog/tools printed on a GPU."""
    command = f"worklog/tools/{name}.cu"
    text = (ROOT / "worklog" / "tools" / f"{name}.txt").read_text(encoding="utf-8")
    return show(command, text, f"What {command} printed on one {figures.ladder()['gpu']}.")
