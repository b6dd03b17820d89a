// Element types of rows and of the cache, and conversions between them.
#ifndef NEOJAX_CPU_PAGED_ATTN_DTYPE_H_
#define NEOJAX_CPU_PAGED_ATTN_DTYPE_H_

#include <cstdint>
#include <cstring>

namespace neojax {

enum class Dtype { kFloat32, kBFloat16 };

inline int ElementSize(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline const char* DtypeName(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : "bfloat16";
}

inline float FloatFromBf16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t Bf16FromFloat(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return (wide >> 16) | 0x40;
  return static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
}

inline float LoadFloat(const void* base, Dtype dtype, int64_t index) {
  return dtype == Dtype::kFloat32
             ? static_cast<const float*>(base)[index]
             : FloatFromBf16(static_cast<const uint16_t*>(base)[index]);
}

inline void StoreFloat(void* base, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] = Bf16FromFloat(value);
  }
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_DTYPE_H_
