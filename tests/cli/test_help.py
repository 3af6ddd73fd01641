"""Help, versions, wrong options; and that manual page and completion know every option."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import program
from program import OUTPUT, SOURCE, USAGE

COMMANDS = ("run", "verify", "quantize", "bench", "info")


class Help(program.ProgramTest):
    def options_of(self, command):
        return re.findall(r"^ {2,6}(?:-\S, )?(--[a-z0-9-]+)", self.succeed(command, "--help").stdout,
                          re.MULTILINE)

    def test_help(self):
        text = self.succeed("--help").stdout
        for command in COMMANDS:
            self.assertRegex(text, rf"\n  {command} ")
            self.assertIn(f"Usage: fa3 {command} [OPTION...]",
                          self.succeed(command, "--help").stdout)
        for code in range(8):
            self.assertRegex(text, rf"\n  {code}  ")
        for line in text.partition("Environment:\n")[2].splitlines():
            self.assertRegex(line, "^  [A-Z0-9_]+  ")  # none is wrapped

    def test_no_line_of_blanks(self):
        for command in COMMANDS:
            self.assertNotRegex(self.succeed(command, "--help").stdout, r"(?m)^ +$")

    def test_usage_says_what_is_needed(self):
        text = self.succeed("run", "--help").stdout
        self.assertTrue(text.startswith(
            "Usage: fa3 run [OPTION...] --q TENSOR --k TENSOR --v TENSOR --out FILE\n"
            "  or:  fa3 run [OPTION...] --in FILE --out FILE\n"), text)
        text = self.succeed("verify", "--help").stdout
        self.assertTrue(text.startswith(
            "Usage: fa3 verify [OPTION...] --q TENSOR --k TENSOR --v TENSOR [--out TENSOR]\n"
            "  or:  fa3 verify [OPTION...] --in FILE [--out TENSOR]\n"), text)

    def test_help_by_other_words(self):
        text = self.succeed("--help").stdout
        for words in ("-h",), ("help",), ("help", "-h"):
            self.assertEqual(self.succeed(*words).stdout, text)
        for command in COMMANDS:
            text = self.succeed(command, "--help").stdout
            for words in (command, "-h"), ("help", command):
                self.assertEqual(self.succeed(*words).stdout, text)
        self.refuse(USAGE, ["no command 'runs'"], "help", "runs")

    def test_every_group_has_options(self):
        for command in COMMANDS:
            for heading in re.findall(r"\n [A-Z].*:\n(.*)\n", self.succeed(command, "--help").stdout):
                self.assertRegex(heading, "^ +--", command)

    def test_version(self):
        texts = {self.succeed("--version").stdout}
        texts.update(self.succeed(command, "--version").stdout for command in COMMANDS)
        self.assertEqual(len(texts), 1)
        self.assertRegex(texts.pop(), r"^fa3 \d+\.\d+\.\d+\n$")

    def test_wrong_words(self):
        self.assertEqual(self.run_fa3().returncode, USAGE)
        self.refuse(USAGE, ["no command 'runs'"], "runs")
        self.refuse(USAGE, ["--nothing"], "--nothing")
        for command in COMMANDS:
            self.refuse(USAGE, [f"fa3 {command}: ", "--nothing"], command, "--nothing")
            self.refuse(USAGE, ["word"], command, "word")

    def test_wrong_options_have_one_form(self):
        """Whether argp finds them or what comes after it."""
        inputs = ("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy")
        for name, arguments in (("fa3", ("runs",)), ("fa3", ("--nothing",)),
                                ("fa3 run", ("run",)), ("fa3 run", ("run", "--q", ":q", *inputs[3:])),
                                ("fa3 bench", ("bench", "--heads", "4", "--heads-k", "3")),
                                ("fa3 verify", ("verify", "--in", "in.safetensors", "--rows", "0"))):
            done = self.refuse(USAGE, [f"{name}: "], *arguments)
            self.assertEqual(done.stderr.splitlines()[-1], f"Try `{name} --help' or `{name} --usage' "
                             "for more information.")

    def test_missing_options(self):
        self.refuse(USAGE, ["--q is missing, and there is no --in"], "run", "--out", "o.npy")
        self.refuse(USAGE, ["--v is missing"], "run", "--q", "q.npy", "--k", "k.npy", "--out",
                    "o.npy")
        self.refuse(USAGE, ["--out is missing"], "run", "--in", "in.safetensors")
        self.refuse(USAGE, ["--in in.npy: expected a .safetensors file"], "run", "--in", "in.npy",
                    "--out", "o.npy")
        self.refuse(USAGE, [":q: names a tensor of the --in file"], "run", "--q", ":q", "--k",
                    "k.npy", "--v", "v.npy", "--out", "o.npy")

    def test_bad_values(self):
        inputs = ("run", "--in", "in.safetensors", "--out", "o.npy")
        for options in (("--window", "1"), ("--window", "1,2,3"), ("--window=-2,0",),
                        ("--window", "a,b"), ("--scale", "nan"), ("--scale", "1e99"),
                        ("--scale", "1e-46"), ("--softcap", "1e-46"), ("--softcap", "1e-40"),
                        ("--softcap", "-1"), ("--softcap", "inf"), ("--softcap", ""),
                        ("--layout", "sbhd"), ("--out-dtype", "int8"), ("--threads", "0"),
                        ("--threads", "1025"), ("--threads", "2147483648"),
                        ("--threads", "1", "--device", "cuda")):
            self.refuse(USAGE, [options[0].split("=")[0]], *inputs, *options)

    def test_stdout_that_fails(self):
        for arguments in (("info",), ("info", "--json"), ("--help",), ("--version",),
                          ("run", "--help"), ("bench", "--usage")):
            with open("/dev/full", "w") as full:
                done = subprocess.run([program.PROGRAM, *arguments], stdout=full, text=True,
                                      stderr=subprocess.PIPE)
            self.assertEqual(done.returncode, OUTPUT)
            self.assertIn("fa3: standard output: No space left", done.stderr)

    def test_nothing_asked(self):
        done = self.run_fa3()
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        for command in COMMANDS:
            self.assertRegex(done.stderr, rf"\n  {command} ")

    def test_environment(self):
        environment = {**os.environ, "FA3_CPU_LEVEL": "nonsense"}
        self.refuse(USAGE, ["FA3_CPU_LEVEL is \"nonsense\": expected one of plain"], "bench",
                    "--device", "cpu", env=environment)
        done = self.succeed("info", env=environment)
        self.assertRegex(done.stdout, r"\ncpu +can't be used: FA3_CPU_LEVEL")
        self.assertNotRegex(done.stdout, r"(?m)^ *:")
        for name in ("FA3_CPU_LEVEL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
            self.assertIn(name, self.succeed("--help").stdout)

    def test_manual_page_has_every_option(self):
        page = Path(os.environ["FA3_MANUAL"]).read_text().replace("\\-", "-")
        for command in COMMANDS:
            for option in self.options_of(command):
                if option not in ("--usage", "--version"):
                    self.assertRegex(page, re.escape(option) + r"\b", command)

    def test_completion_of_other_shells(self):
        """zsh's is at least read; fish's is asked."""
        folder = SOURCE / "cli" / "completion"
        for shell, name in (("zsh", "_fa3"), ("fish", "fa3.fish")):
            if shutil.which(shell):
                subprocess.run([shell, "-n", folder / name], check=True)
        if not shutil.which("fish"):
            self.skipTest("there is no fish")
        (self.folder / "fa3").symlink_to(program.PROGRAM)
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}",
                       "HOME": str(self.folder)}

        def complete(text):
            done = subprocess.run(["fish", "-c", f'source {folder}/fa3.fish; complete -C "{text}"'],
                                  text=True, capture_output=True, env=environment, check=True)
            return sorted(line.split("\t")[0] for line in done.stdout.splitlines())

        self.assertEqual(complete("fa3 ver"), ["verify"])
        self.assertEqual(complete("fa3 run --cu"), ["--cu-seqlens-k", "--cu-seqlens-q"])

    def test_completion(self):
        if not os.path.exists("/dev/fd"):
            self.skipTest("bash has no process substitution: /proc is not mounted")

        def complete(*words):
            script = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fa3; '
                      'printf "%s\\n" "${COMPREPLY[@]}"')
            done = subprocess.run(["bash", "-c", script, "bash",
                                   SOURCE / "cli" / "completion" / "fa3.bash", program.PROGRAM, *words],
                                  text=True, capture_output=True, cwd=self.folder, check=True)
            return sorted(done.stdout.split())

        self.assertEqual(complete("ve"), ["verify"])
        self.assertEqual(complete("run", "--cu"), ["--cu-seqlens-k", "--cu-seqlens-q"])
        self.assertEqual(complete("run", "--device", "cu"), ["cuda"])
        for command in COMMANDS:
            self.assertEqual(complete(command, "--"), sorted(self.options_of(command)))
        for name in ("q.npy", "in.safetensors", "notes.txt"):
            (self.folder / name).touch()
        self.assertEqual(complete("run", "--q", ""), ["in.safetensors", "q.npy"])


program.main()
