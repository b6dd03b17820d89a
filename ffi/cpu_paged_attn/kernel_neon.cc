// Kernels for NEON, which every aarch64 has.
#include "ffi/cpu_paged_attn/neon_inl.h"
#include "ffi/cpu_paged_attn/read_inl.h"

namespace neojax {

const KernelTable kNeonKernels = {
    "neon",
    &Attention<Neon, Plain<Neon, float>>::Run,
    &Attention<Neon, Paired<Neon>>::Run,
    &Attention<Neon, Plain<Neon, uint16_t>>::Run,
    &Read<Neon>,
    &ReadTiles<Neon>,
};

}  // namespace neojax
