// SPDX-License-Identifier: Apache-2.0
// One kernel, KERNEL's ENTRY, as a function of the host; 0 where a thread did what no thread may. Arguments
// come as cuLaunchKernel takes them: where each value is.
#include KERNEL

#include <cstddef>
#include <type_traits>

template <class... A, std::size_t... I>
bool launch(void (*kernel)(A...), void** values, Index grid, int block, int cluster, int together, int bytes,
            bool late, std::index_sequence<I...>) {
    return emulator::run_grid(grid, block, cluster, together, bytes, late,
                              [=] { kernel(*static_cast<std::remove_cvref_t<A>*>(values[I])...); });
}

template <class... A>
bool launch(void (*kernel)(A...), void** values, Index grid, int block, int cluster, int together, int bytes,
            bool late) {
    return launch(kernel, values, grid, block, cluster, together, bytes, late,
                  std::index_sequence_for<A...>{});
}

extern "C" int run(void** values, unsigned x, unsigned y, unsigned z, int block, int cluster, int together,
                   int bytes, int late) {
    return launch(ENTRY, values, {x, y, z}, block, cluster, together, bytes, late != 0);
}

extern "C" const char* trace() { return emulator::trace.c_str(); }
