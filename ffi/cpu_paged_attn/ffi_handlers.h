// The XLA FFI face of the lane, for the platforms CPU and CUDA.
#ifndef NEOJAX_CPU_PAGED_ATTN_FFI_HANDLERS_H_
#define NEOJAX_CPU_PAGED_ATTN_FFI_HANDLERS_H_

#include <utility>
#include <vector>

namespace neojax {

// Target names and their XLA_FFI_Handler pointers.
std::vector<std::pair<const char*, void*>> CpuHandlers();
// The same names for the CUDA platform.
std::vector<std::pair<const char*, void*>> CudaHandlers();

// FFI API version of the headers this library was built with.
std::pair<int, int> FfiApiVersion();

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_FFI_HANDLERS_H_
