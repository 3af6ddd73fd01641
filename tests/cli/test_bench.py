"""fa3 bench: the cells asked for, with figures that agree with each other."""
import json
from xml.etree import ElementTree

import program
from program import UNSUPPORTED, USAGE

SMALL = ("bench", "--seqlen", "40,64", "--head-dim", "16,32", "--heads", "4", "--batch", "2",
         "--repeat", "3")


class Bench(program.ProgramTest):
    def test_json(self):
        for extra, factor in ((), 1), (("--causal",), 0.5):
            report = json.loads(self.succeed(*SMALL, "--heads-k", "2", "--dtype", "fp32,fp16,bf16",
                                             "--json", *extra).stdout)
            self.assertEqual((report["device"], report["repeat"]), ("cpu", 3))
            cells = [(cell["dtype"], cell["head_dim"], cell["seqlen"])
                     for cell in report["results"]]
            self.assertEqual(cells, [(dtype, head_dim, seqlen) for dtype in ("fp32", "fp16", "bf16")
                                     for head_dim in (16, 32) for seqlen in (40, 64)])
            for cell in report["results"]:
                flops = 4 * 2 * 4 * cell["seqlen"] ** 2 * cell["head_dim"] * factor
                self.assertEqual((cell["flops"], cell["heads_k"]), (flops, 2))
                self.assertAlmostEqual(cell["tflops"] * cell["seconds_median"], flops / 1e12)
                times = [cell["seconds_" + name] for name in (
                    "min", "lower_quartile", "median", "upper_quartile", "max")]
                self.assertEqual(times, sorted(times))
                self.assertGreater(times[0], 0)

    def test_plot(self):
        """A bar for each cell, the longest for the fastest."""
        report = json.loads(self.succeed(*SMALL, "--dtype", "fp32,bf16", "--causal", "--json",
                                         "--plot", "p.svg").stdout)
        root = ElementTree.parse(self.path("p.svg")).getroot()
        bars = root.findall("{http://www.w3.org/2000/svg}rect")[1:]
        speeds = [cell["tflops"] for cell in report["results"]]
        self.assertEqual(len(bars), len(speeds))
        longest = max(range(len(bars)), key=lambda bar: float(bars[bar].get("width")))
        self.assertAlmostEqual(speeds[longest], max(speeds), delta=0.01 * max(speeds))
        text = (self.folder / "p.svg").read_text()
        self.assertIn("bf16, head dim 32, seqlen 64, causal", text)
        self.refuse(USAGE, ["--plot p.png: expected a .svg file"], *SMALL, "--plot", "p.png")
        self.refuse(USAGE, ["--heads-k 3: expected a divisor of --heads 4"], *SMALL, "--heads-k", "3")

    def test_table(self):
        lines = self.succeed(*SMALL, "--dtype", "fp32", "--threads", "1").stdout.splitlines()
        self.assertIn("1 threads; median of 3 runs", lines[0])
        self.assertEqual(lines[2].split()[:3], ["dtype", "batch", "seqlen"])
        self.assertEqual(lines[-2], "")
        self.assertIn("checked against float64", lines[-1])
        self.assertEqual([line.split()[:7] for line in lines[3:-2]],
                         [["fp32", "2", str(seqlen), "4", "4", str(head_dim), "no"]
                          for head_dim in (16, 32) for seqlen in (40, 64)])

    def test_backward(self):
        report = json.loads(self.succeed(*SMALL, "--heads-k", "2", "--dtype", "fp16,fp32", "--causal",
                                         "--backward", "--deterministic", "--json").stdout)
        self.assertEqual((report["phase"], report["deterministic"]), ("backward", True))
        for cell in report["results"]:
            self.assertEqual(cell["flops"], 10 * 2 * 4 * cell["seqlen"] ** 2 * cell["head_dim"] / 2)
        self.assertIn("backward pass, median", self.succeed(*SMALL, "--backward").stdout)
        self.refuse_quietly(USAGE, ["--deterministic is for --backward"], "--deterministic")

    def test_bad_options(self):
        for options in (("--seqlen", "0"), ("--seqlen", "8,"), ("--seqlen", "x"),
                        ("--head-dim", "257"), ("--dtype", "fp8"), ("--dtype", "fp32,"),
                        ("--dtype", ""), ("--repeat", "0"), ("--batch", "-1"), ("--heads", "1.5"),
                        ("--threads", "0")):
            self.refuse_quietly(USAGE, [options[0]], *options)
        self.refuse_quietly(USAGE, ["heads"], "--heads-k", "3")
        self.refuse_quietly(UNSUPPORTED, ["head_dim is 12"], "--head-dim", "16,12")
        self.refuse_quietly(USAGE, ["too large"], "--seqlen", "2147483647", "--batch", "2147483647",
                            "--heads", "2147483647")

    def refuse_quietly(self, code, texts, *options):
        """Nothing is printed that looks like a start."""
        self.assertEqual(self.refuse(code, texts, *SMALL, *options).stdout, "")


program.main()
