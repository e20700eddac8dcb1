# What find_package(TT-NN) finds in the tests: the stand-in of this folder.
add_library(ttnn_stand_in_library STATIC ${CMAKE_CURRENT_LIST_DIR}/stand_in.cpp)
target_include_directories(ttnn_stand_in_library PUBLIC ${CMAKE_CURRENT_LIST_DIR}/include)
set_target_properties(ttnn_stand_in_library PROPERTIES POSITION_INDEPENDENT_CODE ON)
add_library(TTNN::TTNN ALIAS ttnn_stand_in_library)

nanobind_add_module(ttnn_stand_in NB_STATIC ${CMAKE_CURRENT_LIST_DIR}/bindings.cpp)
target_link_libraries(ttnn_stand_in PRIVATE ttnn_stand_in_library)
