// The attention of one kv head over a range of one sequence's tokens: what the
// instruction-set files implement.
//
// Included by files compiled for one instruction set, so it must define no
// inline function: the linker would be free to keep that file's version.
#ifndef NEOJAX_CPU_PAGED_ATTN_KERNEL_H_
#define NEOJAX_CPU_PAGED_ATTN_KERNEL_H_

#include <cstdint>

namespace neojax {

// Tokens in one tile, the unit in which K and V are stored and read.
enum : int { kTileTokens = 16 };
// Most query heads that one call takes, and the largest head dim.
enum : int { kMaxGroup = 32, kMaxHeadDim = 256 };

// All pointers are valid for the call; `table` entries have been checked.
struct AttendArgs {
  const float* q;        // [G, H]
  const char* base;      // first tile of this layer and kv head in block 0
  const int32_t* table;  // block of each block_size tokens
  int64_t block_bytes;   // from one block of the layer to the next
  int64_t tile_bytes;    // K and V of 16 tokens
  int tiles_per_block;
  int begin, end;  // tokens [begin, end) are attended to; not empty
  // Where the caller will go on, to be asked for early; next_end = 0: unknown.
  const char* next_base;
  const int32_t* next_table;
  int next_begin, next_end;
  int group;      // G, 1 to kMaxGroup
  int head_dim;   // H, a multiple of 8 up to kMaxHeadDim
  float scale;    // of the logits
  float softcap;  // c: logits become c * tanh(logit / c); 0: unchanged
  float* out;     // [G, H]: sum of exp2(x - max) * v, not normalised
  float* max;     // [G]: largest logit, times log2(e)
  float* sum;     // [G]: sum of exp2(x - max)
};

using AttendFn = void (*)(const AttendArgs&);

// Reads `bytes` (a multiple of 4096, zeros) once, as `streams` (a power of two
// up to 8) interleaved sequences, asking for lines `ahead` bytes early
// (0: not at all). What memory gives; no use but to compare with.
using ReadFn = float (*)(const char* data, int64_t bytes, int streams,
                         int ahead);

struct KernelTable {
  const char* name;
  AttendFn float32;
  AttendFn bfloat16;
  AttendFn float16;
  ReadFn read;
  // Reads the tiles of any dtype in a kernel's order, asking for the next ones
  // as it does, and computes nothing: out is 0, max 0 and sum 1.
  AttendFn read_tiles;
};

extern const KernelTable kScalarKernels;
// x86-64
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;  // bfloat16 only
extern const KernelTable kAmxKernels;         // bfloat16 only
// aarch64
extern const KernelTable kNeonKernels;
extern const KernelTable kNeonBf16Kernels;  // bfloat16 only

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_KERNEL_H_
