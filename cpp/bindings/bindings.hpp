// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

void bind_programs(nanobind::module_& m);
