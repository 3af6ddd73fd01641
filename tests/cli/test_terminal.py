"""The progress bar: on a terminal only, and the work is the same."""
import json
import os
import pty
import re
import subprocess
import termios
import threading
import time

import numpy as np
import safetensors.numpy

import program

# Slow enough to be seen, on any machine.
SLOW = {**os.environ, "FA3_CPU_LEVEL": "plain"}
INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--threads", "1")


class Terminal(program.ProgramTest):
    seconds_of_1024 = None  # measured once

    def on_terminal(self, *arguments, columns=80):
        """Runs with stderr on a terminal; returns what it printed there."""
        try:
            master, slave = pty.openpty()
        except OSError as error:
            self.skipTest(f"no pseudo-terminal: {error}")
        termios.tcsetwinsize(slave, (24, columns))
        printed = []

        def read():
            try:
                while chunk := os.read(master, 4096):
                    printed.append(chunk)
            except OSError:  # the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        done = subprocess.run([program.PROGRAM, *arguments], cwd=self.folder, env=SLOW, stderr=slave,
                              stdout=subprocess.PIPE, text=True, timeout=240)
        os.close(slave)
        reader.join()
        os.close(master)
        text = b"".join(printed).decode()
        self.assertEqual(done.returncode, 0, text)
        self.stdout = done.stdout
        return text

    def check_bar(self, text, label):
        shown = [int(percent) for percent in re.findall(label + r" \[[#.]{30}\] +(\d+)%, \d+:\d\d left",
                                                        text)]
        self.assertGreater(len(shown), 1, text)
        self.assertEqual(shown, sorted(shown))
        self.assertLessEqual(shown[-1], 100)
        self.assertTrue(text.endswith("\r\x1b[K"), "the bar is wiped")

    def make_inputs(self, batch, seqlen, heads):
        """Packed if there is no batch."""
        generator = np.random.default_rng(0)
        shape = (batch, seqlen, heads, 64) if batch else (seqlen, heads, 64)
        self.save(**{name: generator.standard_normal(shape, dtype=np.float32) for name in "qkv"})

    def show_bar(self, label, works):
        """Runs the first of these ever larger works that takes long enough on this machine for
        the bar to move. Each is a function that returns what it printed on the terminal."""
        for work in works:
            text = work()
            if text.count(label + " [") > 1:
                break
        self.check_bar(text, label)

    def seqlen_for(self, seconds):
        """Whose causal attention takes one thread so long, a head."""
        if not Terminal.seconds_of_1024:
            report = self.succeed("bench", "--seqlen", "1024", "--heads", "1", "--head-dim", "64",
                                  "--dtype", "fp32", "--causal", "--threads", "1", "--repeat", "3",
                                  "--json", env=SLOW).stdout
            Terminal.seconds_of_1024 = json.loads(report)["results"][0]["seconds_median"]
        return int(1024 * (seconds / Terminal.seconds_of_1024) ** 0.5)

    def check_parts(self, *masks):
        """In parts it gives what it gives in one."""
        done = self.succeed("run", *INPUTS, *masks, "--out", "whole.npy", "--lse", "whole_lse.npy")
        self.assertNotIn("%", done.stderr)
        for name in ("{}.npy", "{}_lse.npy"):
            parts, whole = self.load(name.format("parts")), self.load(name.format("whole"))
            self.assertFalse(np.isnan(parts).any())
            np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)

    def test_run(self):
        """A part takes half a second: several sequences, or heads of one."""
        def run_in_parts(factor):
            self.make_inputs(6, self.seqlen_for(0.1 * factor), 3)
            return self.on_terminal("run", *INPUTS, "--causal", "--out", "parts.npy", "--lse",
                                    "parts_lse.npy")

        self.show_bar("attention", (lambda factor=factor: run_in_parts(factor)
                                    for factor in (1, 2, 4)))
        self.check_parts("--causal")

    def test_narrow_terminal(self):
        """Each drawing of the bar stays in one line."""
        for columns in (36, 12):
            self.make_inputs(6, self.seqlen_for(0.2), 3)
            text = self.on_terminal("run", *INPUTS, "--causal", "--out", "parts.npy",
                                    columns=columns)
            drawings = text.split("\r\x1b[K")[1:-1]
            self.assertGreater(len(drawings), 1, text)
            for drawing in drawings:
                self.assertLess(len(drawing), max(columns, 22))

    def test_packed(self):
        """Heads of all sequences together."""
        def run_in_parts(factor):
            lengths = [*[self.seqlen_for(0.02 * factor)] * 6, self.seqlen_for(0.1 * factor)]
            starts = ",".join(map(str, np.cumsum([0, *lengths])))
            self.make_inputs(None, sum(lengths), 8)
            self.packed = ("--causal", "--cu-seqlens-q", starts, "--cu-seqlens-k", starts)
            return self.on_terminal("run", *INPUTS, *self.packed, "--out", "parts.npy", "--lse",
                                    "parts_lse.npy")

        self.show_bar("attention", (lambda factor=factor: run_in_parts(factor)
                                    for factor in (1, 2, 4)))
        self.check_parts(*self.packed)

    def test_gradients(self):
        def run_in_parts(factor):
            self.make_inputs(1, self.seqlen_for(0.08 * factor), 8)
            return self.on_terminal("run", *INPUTS, "--causal", "--grad-output", "q.npy", "--grad",
                                    "parts.safetensors")

        self.show_bar("gradients", (lambda factor=factor: run_in_parts(factor)
                                    for factor in (1, 2, 4)))
        self.succeed("run", *INPUTS[:-2], "--causal", "--grad-output", "q.npy", "--grad",
                     "whole.safetensors")
        parts, whole = (safetensors.numpy.load_file(self.path(name + ".safetensors"))
                        for name in ("parts", "whole"))
        for name in ("grad_query", "grad_key", "grad_value"):
            self.assertFalse(np.isnan(parts[name]).any())
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-4)

    def test_verify(self):
        self.make_inputs(1, 4096, 1)
        self.succeed("run", *INPUTS, "--out", "o.npy")
        arguments = ("verify", *INPUTS[:-2], "--out", "o.npy", "--rows")
        start = time.monotonic()
        self.assertNotIn("%", self.succeed(*arguments, "40").stderr)
        rows = int(40 * 1.2 / (time.monotonic() - start))
        self.show_bar("verify", (lambda rows=rows: self.on_terminal(*arguments, str(rows))
                                 for rows in (rows, 2 * rows, 4 * rows)))

    def test_bench(self):
        def bench(repeat):
            return self.on_terminal("bench", "--seqlen", "512,1024", "--head-dim", "64", "--dtype",
                                    "fp32", "--repeat", str(repeat), "--threads", "1", "--device",
                                    "cpu")

        self.show_bar("bench", (lambda repeat=repeat: bench(repeat) for repeat in (5, 20, 100)))
        self.assertNotIn("%,", self.stdout)
        self.assertEqual(len(self.stdout.splitlines()), 7)

    def test_short_work_has_no_bar(self):
        self.make_inputs(1, 8, 1)
        self.assertEqual(self.on_terminal("run", *INPUTS, "--out", "o.npy", "--device", "cpu"), "")


program.main()
