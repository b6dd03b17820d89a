// Element types of rows and of the cache, and conversions between them.
#ifndef NEOJAX_CPU_PAGED_ATTN_DTYPE_H_
#define NEOJAX_CPU_PAGED_ATTN_DTYPE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace neojax {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

inline int ElementSize(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline const char* DtypeName(Dtype dtype) {
  return dtype == Dtype::kFloat32    ? "float32"
         : dtype == Dtype::kBFloat16 ? "bfloat16"
                                     : "float16";
}

// What is wrong with where an array of `size`-byte elements lies, or nothing.
inline std::string CheckAligned(const char* name, const void* data, int size) {
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(data) % size);
  if (past == 0) return {};
  return std::string(name) + " must lie at a multiple of " +
         std::to_string(size) + " bytes, is " + std::to_string(past) +
         " past one";
}

// 16-bit floats by their bits.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float ToFloat(float x) { return x; }
inline float ToFloat(Bf16 x) { return FloatFromBits(uint32_t{x.bits} << 16); }
inline float ToFloat(F16 x) {
  // Shifted into place, the exponent is 112 too small; the multiply also sets
  // subnormals right. Infinities and NaNs get the top exponent.
  uint32_t bits = x.bits;
  uint32_t magnitude =
      BitsFromFloat(FloatFromBits((bits & 0x7fff) << 13) * 0x1p112f);
  if ((bits & 0x7c00) == 0x7c00) magnitude |= 0x7f800000;
  return FloatFromBits(magnitude | (bits & 0x8000) << 16);
}

// All round to nearest even; a NaN stays a NaN, too large becomes infinite.
inline void Assign(float* to, float x) { *to = x; }
inline void Assign(Bf16* to, float x) {
  // Without branches, so that loops become vectors.
  uint32_t bits = BitsFromFloat(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40;
  to->bits = static_cast<uint16_t>(x == x ? rounded : nan);
}
inline void Assign(F16* to, float x) {
  uint32_t bits = BitsFromFloat(x);
  uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 to a subnormal leaves the result in the lowest bits, rounded.
  uint32_t small = BitsFromFloat(FloatFromBits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal =
      (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half =
      magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520: beyond the largest
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  to->bits = static_cast<uint16_t>(sign | half);
}

// Calls fn with a null pointer of the dtype's C++ type.
template <class Fn>
void WithType(Dtype dtype, Fn fn) {
  switch (dtype) {
    case Dtype::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case Dtype::kBFloat16:
      return fn(static_cast<Bf16*>(nullptr));
    case Dtype::kFloat16:
      return fn(static_cast<F16*>(nullptr));
  }
}

// `count` elements from one array to another of its own dtype.
template <class To, class From>
void ConvertElements(To* to, const From* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Assign(to + i, ToFloat(from[i]));
}

inline float LoadFloat(const void* base, Dtype dtype, int64_t index) {
  float value = 0;
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    value = ToFloat(static_cast<const T*>(base)[index]);
  });
  return value;
}

inline void StoreFloat(void* base, Dtype dtype, int64_t index, float value) {
  WithType(dtype, [&](auto* type) {
    Assign(static_cast<decltype(type)>(base) + index, value);
  });
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_DTYPE_H_
