"""The progress bar: on a terminal only, and the work is the same."""
import os
import pty
import re
import subprocess
import threading

import numpy as np

import program

# Slow enough to be seen, on any machine.
SLOW = {**os.environ, "FA3_CPU_LEVEL": "plain"}
INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--threads", "1")


class Terminal(program.ProgramTest):
    def on_terminal(self, *arguments):
        """Runs with stderr on a terminal; returns what it printed there."""
        master, slave = pty.openpty()
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
        self.assertTrue(text.endswith(" \r"), "the bar is wiped")

    def make_inputs(self, batch, seqlen, heads, heads_k):
        generator = np.random.default_rng(0)
        for name, count in (("q", heads), ("k", heads_k), ("v", heads_k)):
            self.save(**{name: generator.standard_normal((batch, seqlen, count, 64),
                                                         dtype=np.float32)})

    def show_bar(self, label, works):
        """Runs the first of these ever larger works that takes long enough on this machine for
        the bar to move. Each is a function that returns what it printed on the terminal."""
        for work in works:
            text = work()
            if text.count("%") > 1:
                break
        self.check_bar(text, label)

    def check_run(self, *shapes):
        """In parts, which are rows, heads or sequences, it gives what it gives in one."""
        def run_in_parts(shape):
            self.make_inputs(*shape)
            return self.on_terminal("run", *INPUTS, "--causal", "--out", "parts.npy", "--lse",
                                    "parts_lse.npy", "--device", "cpu")

        self.show_bar("attention", (lambda shape=shape: run_in_parts(shape) for shape in shapes))
        done = self.succeed("run", *INPUTS, "--causal", "--out", "whole.npy", "--lse",
                            "whole_lse.npy", env=SLOW)
        self.assertNotIn("%", done.stderr)
        for name in ("{}.npy", "{}_lse.npy"):
            parts, whole = self.load(name.format("parts")), self.load(name.format("whole"))
            self.assertFalse(np.isnan(parts).any())
            np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)

    def test_run_in_rows(self):
        self.check_run(*((1, 4096 * 2**i, 1, 1) for i in range(5)))

    def test_run_in_heads(self):
        self.check_run(*((1, 4096, 8 * 2**i, 4 * 2**i) for i in range(5)))

    def test_run_in_sequences(self):
        self.check_run(*((16 * 2**i, 1024, 4, 4) for i in range(6)))

    def test_verify(self):
        self.make_inputs(1, 4096, 1, 1)
        self.succeed("run", *INPUTS, "--out", "o.npy")
        arguments = ("verify", *INPUTS[:-2], "--out", "o.npy", "--rows")
        self.show_bar("verify", (lambda rows=rows: self.on_terminal(*arguments, str(rows))
                                 for rows in (256, 1024, 4096)))
        self.assertNotIn("%", self.succeed(*arguments, "100").stderr)

    def test_bench(self):
        def bench(repeat):
            return self.on_terminal("bench", "--seqlen", "512,1024", "--head-dim", "64", "--dtype",
                                    "fp32", "--repeat", str(repeat), "--threads", "1", "--device",
                                    "cpu")

        self.show_bar("bench", (lambda repeat=repeat: bench(repeat) for repeat in (5, 20, 100)))
        self.assertNotIn("%,", self.stdout)
        self.assertEqual(len(self.stdout.splitlines()), 5)

    def test_short_work_has_no_bar(self):
        self.make_inputs(1, 8, 1, 1)
        self.assertEqual(self.on_terminal("run", *INPUTS, "--out", "o.npy", "--device", "cpu"), "")


program.main()
