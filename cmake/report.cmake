# What `fovea report` needs beside the program: programs in Python that read files of results and make a page of them.
set(report_files report.py report_charts.py report_data.py gpu_report.py)
function(fovea_install_report destination)
  list(TRANSFORM report_files PREPEND ${PROJECT_SOURCE_DIR}/bench/)
  install(FILES ${report_files} DESTINATION ${destination} ${ARGN})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/report_page DESTINATION ${destination} ${ARGN})
endfunction()
