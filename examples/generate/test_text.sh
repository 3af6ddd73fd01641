#!/bin/sh
# A prompt is continued by the same bytes with the cache and without, alone and in a batch, whether
# or not it shares pages; and a file that is no model is refused.
# Usage: test_text.sh GENERATE MODEL SCRATCH_DIR
set -eu
generate=$1 model=$2 scratch=$3
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch"

fail() {
  echo "$*" >&2
  exit 1
}

# The first two begin with the same 41 bytes, two whole pages and nine more.
one='hacker: n. A person who enjoys learning the details'
two='hacker: n. A person who enjoys learning how it works'
other='x'
# Longer than the window.
long="$one, and who reads the whole of the manual before the machine is taken apart, which is rare, and \
then puts all of it together again in the dark"
"$generate" -n 16 "$model" "$one" "$two" "$other" "$long" >cached 2>log
"$generate" -n 16 -r "$model" "$one" "$two" "$other" "$long" >recomputed
cmp cached recomputed
grep -q '0 of them shared' log || fail "prompts that begin differently share pages"

"$generate" -n 16 "$model" "$one" "$two" >shared 2>log
grep -q '2 of them shared' log || fail "prompts that begin alike do not share their pages"
cmp -n $(($(wc -c <shared) - 1)) shared cached # but for the line's end
for prompt in "$one" "$two" "$other" "$long"; do
  "$generate" -n 16 "$model" "$prompt"
  echo ----
done >alone 2>log
sed '$d' alone | cmp - cached

# Bytes drawn from probabilities that are nearly even, which small errors change; and prompts of one
# page exactly, whose last token is never shared.
"$generate" -n 16 -t 1.5 "$model" 0123456789abcdef 0123456789abcdef "$long" >drawn 2>log
"$generate" -n 16 -t 1.5 -r "$model" 0123456789abcdef 0123456789abcdef "$long" >recomputed
cmp drawn recomputed

for temperature in -1 nan; do
  if "$generate" -t $temperature "$model" a 2>log; then fail "a temperature of $temperature was taken"; fi
  grep -q 'a temperature of 0 or more' log
done
head -c 100000 "$model" >cut.safetensors
if "$generate" cut.safetensors a 2>log; then fail "a file that was cut short was taken"; fi
grep -q 'cut short' log
echo '{}' >other.safetensors
if "$generate" other.safetensors a 2>log; then fail "a file of something else was taken"; fi
grep -q 'not a file of this model' log
