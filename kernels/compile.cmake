# Compiles one kernel file to a cubin, and fails if the compiler could not do what the source asks:
# registers spilled to memory (or an array that lives there), matrix products serialised (C7510 and
# its kin), setmaxnreg ignored (C7508), any warning.
#   cmake -DNVCC= -DFLAGS= -DSOURCE= -DKIND= -DCUBIN= -DFACTS= -P compile.cmake
# FACTS is written last: one line of JSON with what the compiler says of each kernel in the file.
string(TIMESTAMP begin "%s%f")
execute_process(COMMAND ${NVCC} ${FLAGS} -cubin -Xptxas -v -MD -MF ${CUBIN}.d -MT ${FACTS}
                        -o ${CUBIN} ${SOURCE}
                OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
string(TIMESTAMP end "%s%f")
get_filename_component(name ${CUBIN} NAME_WE)
if(result OR output MATCHES "warning|C75[0-9][0-9]|[1-9][0-9]* bytes (stack frame|spill)")
  file(REMOVE ${CUBIN})
  message(FATAL_ERROR "${name} is not compiled as it is meant to be:\n${output}")
endif()

math(EXPR milliseconds "(${end} - ${begin}) / 1000")
file(SIZE ${CUBIN} bytes)
set(kernels "")
string(REGEX MATCHALL "entry function '[^']+'|Used [0-9]+ registers" words "${output}")
foreach(word IN LISTS words)
  if(word MATCHES "'(.+)'")
    set(entry ${CMAKE_MATCH_1})
  elseif(word MATCHES "([0-9]+)")
    list(APPEND kernels "\"${entry}\": ${CMAKE_MATCH_1}")
  endif()
endforeach()
list(JOIN kernels ", " kernels)
file(WRITE ${FACTS}
  "{\"name\": \"${name}\", \"kind\": \"${KIND}\", \"registers\": {${kernels}}, \"spills\": 0, \"bytes\": ${bytes}, \"milliseconds\": ${milliseconds}}\n")
