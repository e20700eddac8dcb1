#pragma once

#include <nanobind/nanobind.h>

void bind_programs(nanobind::module_& m);
