# Fails if an instruction-set file defines a symbol that another file could use, its kernel table
# excepted.
foreach(object ${OBJECTS})
  if(NOT object MATCHES "kernel_[a-z0-9_]+\\.cc")
    continue()
  endif()
  execute_process(COMMAND ${NM} -C --defined-only --extern-only ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "\n$" "" symbols "${symbols}")
  string(REPLACE "\n" ";" symbols "${symbols}")
  list(LENGTH symbols count)
  if(NOT count EQUAL 1 OR NOT symbols MATCHES "neojax::k[A-Za-z0-9]+Kernels")
    message(FATAL_ERROR "${object} exports ${symbols}")
  endif()
endforeach()
