// SPDX-License-Identifier: Apache-2.0
// Programs as Python sees them: data with named fields.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ttnn_moe::planner;

void bind_programs(nb::module_& m) {
    nb::class_<Placeholder>(m, "Placeholder", "A value that is known only when a program is run.")
        .def_ro("kind", &Placeholder::kind,
                "address, accessor (a TensorAccessor's compile-time arguments), scalar, noc_x or noc_y.")
        .def_ro("name", &Placeholder::name, "Name of the tensor or of the scalar.")
        .def_ro("index", &Placeholder::index, "Column or row of the grid.")
        .def("__repr__", [](const Placeholder& p) {
            return "<" + p.kind + " " + (p.name.empty() ? std::to_string(p.index) : p.name) + ">";
        });
    nb::class_<ComputeConfig>(m, "ComputeConfig", "Settings of a compute kernel.")
        .def_ro("math_fidelity", &ComputeConfig::math_fidelity, "LoFi, HiFi2, HiFi3, HiFi4.")
        .def_ro("fp32_dest_acc", &ComputeConfig::fp32_dest_acc, "DST holds fp32.")
        .def_ro("approx", &ComputeConfig::approx, "Approximate SFPU functions.")
        .def_ro("dst_full_sync", &ComputeConfig::dst_full_sync, "DST is not halved.")
        .def_ro("unpack_to_dest_fp32", &ComputeConfig::unpack_to_dest_fp32,
                "Circular buffers that are unpacked to DST as fp32.");
    nb::class_<Kernel>(m, "Kernel", "One kernel on some cores.")
        .def_ro("source", &Kernel::source, "Path below device_kernels/.")
        .def_ro("role", &Kernel::role, "Which processor runs it: \"reader\", \"writer\" or \"compute\".")
        .def_ro("cores", &Kernel::cores, "(x, y), logical.")
        .def_ro("compile_args", &Kernel::compile_args, "Compile-time arguments, by position.")
        .def_ro("named_compile_args", &Kernel::named_compile_args, "Compile-time arguments, by name.")
        .def_ro("defines", &Kernel::defines, "Preprocessor definitions.")
        .def_ro("common_args", &Kernel::common_args, "Runtime arguments of all cores.")
        .def_ro("args", &Kernel::args, "Runtime arguments of each core.")
        .def_ro("config", &Kernel::config, "Settings; of a compute kernel only.");
    nb::class_<CircularBuffer>(m, "CircularBuffer", "A circular buffer, at one L1 address on all its cores.")
        .def_ro("index", &CircularBuffer::index, "Its number in the kernels.")
        .def_ro("total_size", &CircularBuffer::total_size, "Bytes on each core.")
        .def_ro("page_size", &CircularBuffer::page_size, "Bytes of a page.")
        .def_ro("format", &CircularBuffer::format, "bfloat16, float32, bfloat8_b, bfloat4_b, uint32.")
        .def_ro("cores", &CircularBuffer::cores, "(x, y), logical.");
    nb::class_<Semaphore>(m, "Semaphore", "A semaphore on some cores.")
        .def_ro("id", &Semaphore::id, "Its number in the kernels.")
        .def_ro("initial", &Semaphore::initial, "Its value when the program starts.")
        .def_ro("cores", &Semaphore::cores, "(x, y), logical.");
    nb::class_<Program>(m, "Program", "One operator's program for one device.")
        .def_ro("kernels", &Program::kernels, "Kernels.")
        .def_ro("buffers", &Program::buffers, "Circular buffers, in the order in which they lie in L1.")
        .def_ro("semaphores", &Program::semaphores, "Semaphores.")
        .def_prop_ro("l1_bytes", &Program::l1_bytes, "Bytes of L1 that the buffers take on a core.");

    nb::class_<Problem>(m, "Problem", "Sizes to plan for; T is a bound.")
        .def(
            "__init__",
            [](Problem* self, std::uint32_t T, std::uint32_t E, std::uint32_t E_local, std::uint32_t K,
               std::uint32_t H, std::uint32_t I, const std::string& weight_format,
               const std::string& out_format, const std::string& math_fidelity, bool fp32_dest, bool banked) {
                new (self) Problem{
                    T, E, E_local, K, H, I, weight_format, out_format, math_fidelity, fp32_dest, banked};
            },
            nb::kw_only(), "T"_a, "E"_a, "E_local"_a, "K"_a, "H"_a, "I"_a, "weight_format"_a = "bfloat16",
            "out_format"_a = "bfloat16", "math_fidelity"_a = "", "fp32_dest"_a = true, "banked"_a = false)
        .def_ro("T", &Problem::T, "Most tokens of a call.")
        .def_ro("E", &Problem::E, "Experts of all devices.")
        .def_ro("E_local", &Problem::E_local, "Experts of this device.")
        .def_ro("K", &Problem::K, "Experts per token.")
        .def_ro("H", &Problem::H, "Hidden size.")
        .def_ro("I", &Problem::I, "Expert intermediate size.")
        .def_ro("weight_format", &Problem::weight_format, "bfloat16, bfloat8_b or bfloat4_b.")
        .def_ro("out_format", &Problem::out_format, "bfloat16 or float32.")
        .def_ro("math_fidelity", &Problem::math_fidelity, "LoFi, HiFi2, HiFi3, HiFi4; empty: the format's.")
        .def_ro("fp32_dest", &Problem::fp32_dest, "DST holds fp32; else bf16.")
        .def_ro("banked", &Problem::banked,
                "A DRAM bank holds one part of every expert's weights: weight_run.")
        .def_prop_ro("padded_tokens", &padded_tokens, "T rounded up to 32: columns of routed_tokens.")
        .def_prop_ro("max_blocks", &max_blocks, "Most blocks of 32 rows that one device can have.");
    nb::class_<Machine>(m, "Machine", "What a program may use of a chip.")
        .def(
            "__init__",
            [](Machine* self, std::pair<std::uint32_t, std::uint32_t> grid, std::uint64_t l1_bytes,
               bool unpack_to_dest, std::uint32_t min_tiles, std::uint32_t dram_banks,
               const std::vector<std::pair<std::uint32_t, std::uint32_t>>& bank_cores) {
                new (self) Machine{
                    {grid.first, grid.second}, l1_bytes, unpack_to_dest, min_tiles, dram_banks, bank_cores};
            },
            nb::kw_only(), "grid"_a, "l1_bytes"_a, "unpack_to_dest"_a = true, "min_tiles"_a = 4,
            "dram_banks"_a = 8, "bank_cores"_a = std::vector<std::pair<std::uint32_t, std::uint32_t>>{})
        .def_prop_ro(
            "grid", [](const Machine& c) { return std::pair{c.grid.x, c.grid.y}; },
            "Columns and rows of cores.")
        .def_ro("l1_bytes", &Machine::l1_bytes, "L1 of one core, bytes.")
        .def_ro("unpack_to_dest", &Machine::unpack_to_dest,
                "fp32 is unpacked to DST as it is; else cut to TF32.")
        .def_ro("min_tiles", &Machine::min_tiles, "Tiles of a product that are worth a core.")
        .def_ro("dram_banks", &Machine::dram_banks, "DRAM banks that tensors are interleaved over.")
        .def_ro("bank_cores", &Machine::bank_cores,
                "Of each bank, (x, y) of the core to its right; empty: not known.")
        .def_prop_ro("usable_l1", &Machine::usable_l1, "What a core's circular buffers may take, bytes.");

    m.def("default_fidelity", &default_fidelity, "weight_format"_a,
          "The math fidelity of products with weights of a format. ValueError: an unknown format.");
    m.def("weight_run", &weight_run, "weight_format"_a, "by_bank"_a = false, "expert_tiles"_a = 0,
          "banks"_a = 0,
          "Tiles of a weight matrix that lie side by side in a DRAM bank. ValueError: unknown format;\n"
          "by_bank without tiles or banks.\n\n"
          "by_bank: what each bank gets of an expert of expert_tiles, if the banks share it evenly.");
    m.def("plan_routing", &plan_routing, "problem"_a, "machine"_a,
          "topk ids and weights to num_routed_tokens, routed_tokens, routed_token_weights. ValueError: no "
          "such plan.");
    m.def("plan_gate_up", &plan_gate_up, "problem"_a, "machine"_a, "weights"_a = 2,
          "Gate, up and SiLU*mul in one pass (weights 2), or one projection (weights 1). ValueError: no such "
          "plan.");
    m.def("plan_silu_mul", &plan_silu_mul, "problem"_a, "machine"_a,
          "silu(gate) * up over all rows. ValueError: no such plan.");
    m.def("plan_down", &plan_down, "problem"_a, "machine"_a,
          "The down projection, weighted and summed per token. ValueError: no such plan.");
}
