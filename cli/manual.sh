#!/bin/sh
# manual.sh PROGRAM: the manual page, which is fa3.1.in with the options that the program has.
set -eu
folder=$(dirname "$0")
sed '/^@OPTIONS@$/,$d' "$folder/fa3.1.in"
for command in run verify quantize bench info; do
  echo ".SS fa3 $command"
  ARGP_HELP_FMT=rmargin=1000,opt-doc-col=48 "$1" $command --help | awk -f "$folder/options.awk"
done
sed '1,/^@OPTIONS@$/d' "$folder/fa3.1.in"
