// sm80/grouped_gemm.cu as a function of the host; 0 where a thread did what no thread may.
#include KERNEL

extern "C" int run(int blocks, int bytes, int late, const u16* first, const u16* second, const u16* x,
                   const int* row_tokens, const Tile* tiles, const int* num_tiles, u16* out, int depth,
                   int width, int rows_of_expert, int row_stride) {
    return emulator::run_grid(blocks, THREADS, bytes, late, [=] {
        grouped_gemm(first, second, x, row_tokens, tiles, num_tiles, out, depth, width, rows_of_expert,
                     row_stride);
    });
}
