# The program in README.md is examples/project/attention.c, to the letter.
# Usage: cmake -DSOURCE_DIR=... -P check_readme.cmake
file(READ ${SOURCE_DIR}/README.md readme)
file(READ ${SOURCE_DIR}/examples/project/attention.c program)
string(FIND "${readme}" "```c\n${program}```" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md shows another program than examples/project/attention.c")
endif()
