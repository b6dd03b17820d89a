// Kernels for AVX-512 with BF16.
#include "ffi/cpu_paged_attn/avx512bf16_inl.h"

namespace neojax {

const KernelTable kAvx512Bf16Kernels = {
    "avx512bf16", nullptr, &Attention<Avx512, PairedBf16>::Run,
    nullptr,      nullptr, nullptr,
};

}  // namespace neojax
