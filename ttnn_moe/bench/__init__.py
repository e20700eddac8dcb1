"""One MoE layer, measured: sizes, routings, floor, gate, timing, each a module; `measure` ties them together."""
