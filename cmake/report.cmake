# What `fovea report` needs beside the program: the programs in Python that read files of results and make a page of them.
function(fovea_install_report destination)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/report/ DESTINATION ${destination} ${ARGN} PATTERN __pycache__ EXCLUDE)
  install(FILES ${PROJECT_SOURCE_DIR}/bench/gpu/tables.py DESTINATION ${destination} ${ARGN})
endfunction()
