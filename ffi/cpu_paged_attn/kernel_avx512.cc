// Kernels for AVX-512 F, BW and VL.
#include "ffi/cpu_paged_attn/avx512_inl.h"
#include "ffi/cpu_paged_attn/read_inl.h"

namespace neojax {

const KernelTable kAvx512Kernels = {
    "avx512",
    &Attention<Avx512, Plain<Avx512, float>>::Run,
    &Attention<Avx512, Paired<Avx512>>::Run,
    &Attention<Avx512, Plain<Avx512, uint16_t>>::Run,
    &Read<Avx512>,
    &ReadTiles<Avx512>,
};

}  // namespace neojax
