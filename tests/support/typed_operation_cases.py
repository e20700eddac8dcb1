"""What the typed operations refuse, and every name of tt-metal's that they use."""

from __future__ import annotations

from typing import Any

T, BOUND = 40, 64
NOT_DRAM = "memory_config is not interleaved DRAM; got {}; expected DRAM_MEMORY_CONFIG"
HALF_A_BLOCK = "routed_tokens has columns beside whole blocks; got 40; expected a multiple of 32"


def tiles(*shape: int, dtype: str = "bfloat16") -> tuple[tuple[int, ...], str, bool]:
    return shape, dtype, True


def rows(*shape: int, dtype: str = "bfloat16") -> tuple[tuple[int, ...], str, bool]:
    return shape, dtype, False


# operator, the argument, what it is in place of the right one, what the message says of it
BAD: dict[str, tuple[str, str, Any, str]] = {
    "shape": (
        "gate_up",
        "gate",
        tiles(4, 2, 64, 32),
        "gate has the wrong shape; got [4, 2, 64, 32]; expected [4, 2, 96, 32].",
    ),
    "a matrix": (
        "gate_up",
        "gate",
        tiles(4, 96, 64),
        "gate is not in bank order; got [4, 96, 64]; expected [E_local, columns / 32, rows, 32]; to fix it: "
        "in_bank_order of ttnn_moe/tenstorrent/weights.py.",
    ),
    "a matrix of up": ("gate_up", "up", tiles(4, 96, 64), "up is not in bank order; got [4, 96, 64]"),
    "a matrix of down": ("down", "weight", tiles(4, 64, 96), "weight is not in bank order; got [4, 64, 96]"),
    "sharded hidden": (
        "gate_up",
        "hidden",
        lambda on: on.tensor((T, 96), tiled=False, interleaved=False),
        "hidden is not interleaved in DRAM; got sharded in DRAM; expected DRAM_MEMORY_CONFIG; to fix it: "
        "ttnn.to_memory_config(hidden, ttnn.DRAM_MEMORY_CONFIG).",
    ),
    "rank": (
        "gate_up",
        "hidden",
        rows(1, 40, 96),
        "got [1, 40, 96]; expected 2 dimensions; to fix it: ttnn.reshape(hidden, [40, 96]).",
    ),
    "rank of the mapping": (
        "gate_up",
        "device_expert_mapping",
        rows(4, dtype="int32"),
        "device_expert_mapping has the wrong number of dimensions; got [4]; expected 2 dimensions; to fix it: "
        "ttnn.reshape(device_expert_mapping, [1, 4]).",
    ),
    "dtype": (
        "gate_up",
        "hidden",
        rows(T, 96, dtype="float32"),
        "got float32; expected bfloat16; to fix it: ttnn.typecast(hidden, ttnn.bfloat16)",
    ),
    "two dtypes": (
        "down",
        "weight",
        tiles(4, 3, 64, 32, dtype="float32"),
        "got float32; expected bfloat16 or bfloat8_b or bfloat4_b; to fix it: ttnn.typecast(weight,",
    ),
    "up unlike gate": (
        "gate_up",
        "up",
        tiles(4, 2, 96, 32, dtype="bfloat8_b"),
        "up has the wrong dtype; got bfloat8_b; expected bfloat16",
    ),
    "layout": (
        "down",
        "weight",
        rows(4, 3, 64, 32),
        "got ROW_MAJOR; expected TILE; to fix it: ttnn.to_layout(weight, ttnn.TILE_LAYOUT)",
    ),
    "tiles": ("routing", "topk_ids", tiles(T, 2, dtype="int32"), "got TILE; expected ROW_MAJOR"),
    "ids": (
        "routing",
        "topk_ids",
        rows(T, 2, dtype="uint32"),
        "topk_ids has the wrong dtype; got uint32; expected int32",
    ),
    "weights of another T": (
        "routing",
        "topk_weights",
        rows(T + 1, 2, dtype="float32"),
        "topk_weights has the wrong shape",
    ),
    "mapping": (
        "down",
        "device_expert_mapping",
        rows(2, 4, dtype="int32"),
        "device_expert_mapping has the wrong shape; got [2, 4]; expected [1, 4]",
    ),
    "tokens": ("gate_up", "routed_tokens", rows(15, BOUND, dtype="int32"), "routed_tokens has the wrong shape"),
    "half a block of tokens": ("gate_up", "routed_tokens", rows(16, T, dtype="int32"), HALF_A_BLOCK),
    "half a block of tokens of down": ("down", "routed_tokens", rows(16, T, dtype="int32"), HALF_A_BLOCK),
    "routing weights": (
        "down",
        "routed_token_weights",
        rows(16, BOUND, dtype="float32"),
        "routed_token_weights has the wrong dtype",
    ),
    "rows": ("down", "activations", tiles(32, 64), "activations has the wrong shape; got [32, 64]"),
    "output": ("gate_up", "output_tensor", tiles(32, 64), "output has the wrong shape; got [32, 64]"),
    "T": ("gate_up", "hidden", rows(65, 96), "T is beyond what the routing was made for; got 65; expected 1 .. 64."),
    "T of routing": ("routing", "token_bound", 32, "to fix it: a larger token_bound"),
    "T of down": ("down", "num_tokens", 65, "got 65; expected 1 .. 64"),
    "K": ("gate_up", "experts_per_token", 0, "K must be at least 1"),
    "E": ("routing", "num_experts", 3, "E_local = 4 exceeds E = 3"),
    "nothing to add to": ("down", "accumulate", True, "accumulate needs an output to add to; got none"),
    "silu_mul": ("silu_mul", "up", tiles(64, 32), "up has the wrong shape; got [64, 32]; expected [64, 64]"),
    "half a tile": (
        "silu_mul",
        "both",
        tiles(40, 64),
        "gate has rows beside whole tiles; got 40; expected a multiple of 32",
    ),
    "half a column": ("silu_mul", "both", tiles(64, 40), "must be multiples of 32"),
    "packer's sums": (
        "gate_up",
        "compute_kernel_config",
        lambda on: on.compute_config(packer_l1_acc=True),
        "asks for packer_l1_acc, which the kernels do not have; got true; expected false.",
    ),
    "all of DST": (
        "down",
        "compute_kernel_config",
        lambda on: on.compute_config(dst_full_sync_en=True),
        "asks for dst_full_sync_en, which the kernels do not have",
    ),
} | {
    f"{operator}, {case}": (operator, argument, value, message)
    for operator in ("routing", "gate_up", "silu_mul", "down")
    for case, argument, value, message in (
        ("L1", "memory_config", lambda on: on.stand_in.MemoryConfig(dram=False), NOT_DRAM.format("interleaved in L1")),
        (
            "sharded",
            "memory_config",
            lambda on: on.stand_in.MemoryConfig(interleaved=False),
            NOT_DRAM.format("sharded in DRAM"),
        ),
        ("far cores", "subdevice_id", lambda on: on.chip.add_sub_device([(1, 0, 3, 3)]), "got 12 cores from (1, 0)"),
        (
            "an L of cores",
            "subdevice_id",
            lambda on: on.chip.add_sub_device([(0, 0, 3, 0), (0, 1, 1, 1)]),
            "got 6 cores from (0, 0) to (3, 1); expected all cores from (0, 0) on.",
        ),
    )
}

# Every name of theirs in cpp/ttnn_ops.
NAMES = """
ARCH BLACKHOLE WORMHOLE_B0 DataFormat DataType BFLOAT16 FLOAT32 BFLOAT8_B BFLOAT4_B INT32 UINT32 Layout ROW_MAJOR TILE
datatype_to_dataformat_converter Shape rank MemoryConfig memory_layout buffer_type TensorMemoryLayout INTERLEAVED
BufferType DRAM PageConfig TensorLayout TensorSpec StorageType DEVICE Tensor dtype layout logical_shape memory_config
storage_type buffer device create_device_tensor address CoreCoord CoreRange start_coord end_coord CoreRangeSet arch
compute_with_storage_grid_size l1_size_per_core worker_cores HalProgrammableCoreType TENSIX bounding_box num_cores
SubDeviceId DeviceComputeKernelConfig packer_l1_acc dram_grid_size worker_core_from_logical_core ProgramDescriptor
kernels semaphores cbs KernelDescriptor kernel_source source_type SourceType FILE_PATH core_ranges compile_time_args
named_compile_time_args defines runtime_args common_runtime_args config compiler_include_paths CoreRuntimeArgs
ReaderConfigDescriptor WriterConfigDescriptor ComputeConfigDescriptor math_fidelity math_approx_mode fp32_dest_acc_en
dst_full_sync_en unpack_to_dest_mode MathFidelity LoFi HiFi2 HiFi3 HiFi4 UnpackToDestMode UnpackToDestFp32 Default
NUM_CIRCULAR_BUFFERS CBDescriptor total_size format_descriptors CBFormatDescriptor buffer_index data_format page_size
SemaphoreDescriptor id initial_value TensorAccessorArgs append_to Program GetCommonRuntimeArgs TT_THROW TT_FATAL
MeshCoordinate launch device_operation operation_attributes_t tensor_args_t spec_return_value_t tensor_return_value_t
program_factory_t create_descriptor override_runtime_arguments validate_on_program_cache_miss
validate_on_program_cache_hit compute_output_specs create_output_tensors compute_program_hash hash_t
hash_objects_with_default_seed type_hash
"""
