// Which instruction sets this build has kernels for and this machine can run.
#ifndef NEOJAX_CPU_PAGED_ATTN_ISA_H_
#define NEOJAX_CPU_PAGED_ATTN_ISA_H_

#include <string>
#include <vector>

#include "ffi/cpu_paged_attn/kernel.h"

namespace neojax {

// Kernels that run here, slowest first; the first is always "scalar".
std::vector<const KernelTable*> AvailableKernels();

// The kernels called `name`; for an empty name those of the environment
// variable NEOJAX_CPU_ISA, or else the fastest. Throws std::invalid_argument
// saying what is available.
const KernelTable& KernelsFor(const std::string& name);

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_ISA_H_
