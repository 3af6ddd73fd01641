# Reads variants.def. Sets kernel_names, and for each NAME of them NAME_kind, NAME_architecture and
# NAME_definitions (of nvcc). Writes kernels/variants.h in the build's folder: lists for C and for
# the assembler, each calling a macro X for its entries:
#   FA3_KINDS(X)    X(kind)
#   FA3_KEYS(X)     X(key)
#   FA3_KERNELS(X)  X(name, kind, architecture, fields), the fields as designated initialisers; a
#                   value that is a word is the constant KEY_value
# and FA3_KERNEL_COUNT, how many there are.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS variants.def)
file(STRINGS variants.def rows REGEX "^[^#]")
set(kernel_names "")
set(kinds "")
set(keys "")
set(kernels "")
foreach(row IN LISTS rows)
  if(NOT row MATCHES "^([a-z0-9_]+) (sm_[0-9a-z]+)(( [a-z_]+=[a-z0-9_]+)*) \\|(( [a-z_]+=[a-z0-9_]+)*)$")
    message(FATAL_ERROR "variants.def: ${row}")
  endif()
  set(kind ${CMAKE_MATCH_1})
  set(architecture ${CMAKE_MATCH_2})
  separate_arguments(takes UNIX_COMMAND "${CMAKE_MATCH_3}")
  separate_arguments(others UNIX_COMMAND "${CMAKE_MATCH_5}")
  string(REGEX REPLACE ";[a-z_]+=" "_" name "${kind};${takes}")
  string(REGEX REPLACE ";$" "" name "${name}")
  if(name IN_LIST kernel_names)
    message(FATAL_ERROR "variants.def: two rows are ${name}")
  endif()
  set(definitions "")
  set(fields "")
  foreach(pair IN LISTS takes others)
    string(REGEX MATCH "^(.*)=(.*)$" pair "${pair}")
    set(key ${CMAKE_MATCH_1})
    set(value ${CMAKE_MATCH_2})
    string(TOUPPER ${key} KEY)
    string(TOUPPER ${value} VALUE)
    list(APPEND keys ${key})
    if(value MATCHES "^[0-9]+$")
      list(APPEND definitions FA3_${KEY}=${value})
      list(APPEND fields ".${key} = ${value}")
    else()
      list(APPEND definitions FA3_${VALUE}=1)
      list(APPEND fields ".${key} = ${KEY}_${value}")
    endif()
  endforeach()
  list(JOIN fields ", " fields)
  list(APPEND kinds ${kind})
  list(APPEND kernels "X(${name}, ${kind}, ${architecture}, ${fields})")
  list(APPEND kernel_names ${name})
  set(${name}_kind ${kind})
  set(${name}_architecture ${architecture})
  set(${name}_definitions ${definitions})
endforeach()
list(REMOVE_DUPLICATES kinds)
list(REMOVE_DUPLICATES keys)
list(TRANSFORM kinds REPLACE "(.+)" "X(\\1)")
list(TRANSFORM keys REPLACE "(.+)" "X(\\1)")
list(LENGTH kernels count)
foreach(list kinds keys kernels)
  list(JOIN ${list} " \\\n  " ${list})
endforeach()
file(CONFIGURE OUTPUT variants.h @ONLY CONTENT
"/* Made from kernels/variants.def by kernels/variants.cmake. */
#define FA3_KINDS(X) \\
  @kinds@
#define FA3_KEYS(X) \\
  @keys@
#define FA3_KERNELS(X) \\
  @kernels@
#define FA3_KERNEL_COUNT @count@
")
