# The text of --help as the manual page has it: groups of options, then paragraphs. For lines that
# argp does not wrap (ARGP_HELP_FMT), so that an option and its text are on one.
function escaped(line) {
  gsub(/\\/, "\\e", line)
  gsub(/-/, "\\-", line)
  return line ~ /^[.']/ ? "\\&" line : line
}
/^ [A-Z].*:$/ {
  grouped = 1
  print ".PP\n.I " escaped(substr($0, 2))
  next
}
!grouped || /--(help|usage|version)  / { next }
/^ +--/ {
  sub(/^ +/, "")
  columns = index($0, "  ")
  option = substr($0, 1, columns - 1)
  sub(/=/, " ", option)
  text = substr($0, columns)
  sub(/^ +/, "", text)
  print ".TP\n.B " escaped(option) "\n" escaped(text)
  next
}
/^[^ ]/ { print ".PP\n" escaped($0) }
