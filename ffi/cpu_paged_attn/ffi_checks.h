// What the handlers of both platforms check and how they answer XLA.
#ifndef NEOJAX_CPU_PAGED_ATTN_FFI_CHECKS_H_
#define NEOJAX_CPU_PAGED_ATTN_FFI_CHECKS_H_

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "ffi/cpu_paged_attn/lane.h"
#include "xla/ffi/api/ffi.h"

namespace neojax {

namespace ffi = ::xla::ffi;

using Dims = ffi::Span<const int64_t>;

inline ffi::Error Refuse(const std::string& text) {
  return ffi::Error::InvalidArgument(text);
}

inline ffi::Error ToFfi(const char* target, const Error& error) {
  return error.empty() ? ffi::Error::Success()
                       : Refuse(std::string(target) + ": " + error);
}

inline std::string Describe(ffi::DataType type, Dims dims) {
  const char* name = type == ffi::F32    ? "float32"
                     : type == ffi::BF16 ? "bfloat16"
                     : type == ffi::F16  ? "float16"
                     : type == ffi::S32  ? "int32"
                     : type == ffi::U32  ? "uint32"
                     : type == ffi::U16  ? "uint16"
                                         : "another type";
  std::string out = std::string(name) + "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i ? ", " : "") + std::to_string(dims[i]);
  }
  return out + "]";
}

inline bool ToDtype(ffi::DataType type, Dtype* dtype) {
  *dtype = type == ffi::F32    ? Dtype::kFloat32
           : type == ffi::BF16 ? Dtype::kBFloat16
                               : Dtype::kFloat16;
  return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16;
}

inline constexpr char kFloatTypes[] = " must be float32, bfloat16 or float16 ";

// The checks return what is wrong, or nothing.
template <class Buffer>
Error CheckInt32(const char* name, const Buffer& buffer, int64_t size) {
  Dims dims = buffer.dimensions();
  if (buffer.element_type() == ffi::S32 && dims.size() == 1 &&
      dims[0] == size) {
    return CheckAligned(name, buffer.untyped_data(), 4);
  }
  return std::string(name) + " must be int32[" + std::to_string(size) +
         "], got " + Describe(buffer.element_type(), dims);
}

template <class Buffer>
Error CheckFloats(const char* name, const Buffer& buffer, const char* letters,
                  int64_t minor, Dtype* dtype, int64_t* rows) {
  Dims dims = buffer.dimensions();
  if (ToDtype(buffer.element_type(), dtype) && dims.size() == 2 &&
      dims[1] == minor) {
    *rows = dims[0];
    return CheckAligned(name, buffer.untyped_data(), ElementSize(*dtype));
  }
  return std::string(name) + kFloatTypes + letters + " with " +
         std::to_string(minor) + " columns, got " +
         Describe(buffer.element_type(), dims);
}

// An array that begins with a hdr and, from kHeaderBytes on, num_rows rows,
// all by their bits: unsigned integers of the rows' size. What follows is no
// business of the lane.
inline Error CheckMessage(const ffi::AnyBuffer& message, const HostLane& lane,
                          std::string_view name, int64_t num_rows,
                          Dtype* dtype) {
  Dims dims = message.dimensions();
  const ffi::DataType type = message.element_type();
  *dtype = name == "float32"    ? Dtype::kFloat32
           : name == "bfloat16" ? Dtype::kBFloat16
                                : Dtype::kFloat16;
  if (name != DtypeName(*dtype)) {
    return "dtype must be float32, bfloat16 or float16, got " +
           std::string(name);
  }
  const int64_t size = ElementSize(*dtype);
  const int64_t bytes = kHeaderBytes + num_rows * lane.row_elements() * size;
  if (type == (size == 4 ? ffi::U32 : ffi::U16) && dims.size() == 1 &&
      num_rows >= 0 && dims[0] * size >= bytes) {
    return CheckAligned("message", message.untyped_data(), sizeof(int32_t));
  }
  return std::string("message must be uint") + (size == 4 ? "32" : "16") +
         " of " + std::to_string(bytes / size) + " elements or more for " +
         std::to_string(num_rows) + " rows, got " + Describe(type, dims);
}

inline Error FindLane(int64_t id, std::shared_ptr<HostLane>* lane) {
  *lane = HostLane::Find(id);
  if (*lane != nullptr) return {};
  return "lane " + std::to_string(id) + " does not exist or is closed";
}

// What joined rows get, [B, N * H].
template <class Buffer>
Error CheckOut(const Buffer& out, const HostLane& lane, Dtype* dtype,
               int64_t* num_rows) {
  return CheckFloats(
      "out", out, "[B, N*H]",
      int64_t{lane.options().num_q_heads} * lane.shape().head_dim, dtype,
      num_rows);
}

// A start and the join of as many rows.
template <class Out, class Ticket>
Error CheckExchange(const ffi::AnyBuffer& message, const ffi::AnyBuffer& ticket,
                    const Out& out, const Ticket& ticket_out,
                    const HostLane& lane, std::string_view dtype_name,
                    Dtype* started, Dtype* joined, int64_t* num_rows) {
  Error e = CheckOut(out, lane, joined, num_rows);
  if (e.empty()) {
    e = CheckMessage(message, lane, dtype_name, *num_rows, started);
  }
  if (e.empty()) e = CheckInt32("ticket", ticket, 1);
  if (e.empty()) e = CheckInt32("ticket", ticket_out, 1);
  return e;
}

// A scratch array of a fetch, [S, K, H].
inline Error CheckScratch(const char* name, const ffi::AnyBuffer& x,
                          const CacheShape& shape, Dtype* dtype) {
  Dims dims = x.dimensions();
  if (ToDtype(x.element_type(), dtype) && dims.size() == 3 &&
      dims[1] == shape.num_kv_heads && dims[2] == shape.head_dim) {
    return CheckAligned(name, x.untyped_data(), ElementSize(*dtype));
  }
  return std::string(name) + kFloatTypes + "[S, " +
         std::to_string(shape.num_kv_heads) + ", " +
         std::to_string(shape.head_dim) + "], got " +
         Describe(x.element_type(), dims);
}

inline Error CheckScratches(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                            const CacheShape& shape, Dtype* dtype) {
  Error e = CheckScratch("k_scratch", k, shape, dtype);
  if (e.empty()) e = CheckScratch("v_scratch", v, shape, dtype);
  if (e.empty() && (k.element_type() != v.element_type() ||
                    k.dimensions()[0] != v.dimensions()[0])) {
    e = "v_scratch must be like k_scratch";
  }
  return e;
}

// Operand or result of a move, [layers, blocks, elements of a block].
template <class Buffer>
Error CheckMoved(const Buffer& blocks, const HostKVCache& cache,
                 BlockMove* move) {
  const CacheShape& shape = cache.shape();
  const int64_t elements = shape.block_bytes() / ElementSize(shape.dtype);
  Dims dims = blocks.dimensions();
  Dtype dtype;
  if (ToDtype(blocks.element_type(), &dtype) && dtype == shape.dtype &&
      dims.size() == 3 && dims[2] == elements) {
    *move = {static_cast<int>(dims[0]), static_cast<int>(dims[1])};
    return CheckAligned("blocks", blocks.untyped_data(), ElementSize(dtype));
  }
  return std::string("blocks must be ") + DtypeName(shape.dtype) + "[G, C, " +
         std::to_string(elements) + "], got " +
         Describe(blocks.element_type(), dims);
}

// The hdr of a move alone, which says how many blocks a layer has room for.
inline Error CheckMoveHdr(const ffi::AnyBuffer& hdr, int64_t layers,
                          BlockMove* move) {
  const auto size = static_cast<int64_t>(hdr.element_count());
  if (layers < 1) return "layers must be at least 1";
  *move = {static_cast<int>(layers), static_cast<int>(size) - kBlockIds};
  return CheckInt32("hdr", hdr, std::max<int64_t>(size, kBlockIds + 1));
}

// What the calls are given and give, all but their ties.
inline Error CheckStart(const ffi::AnyBuffer& message,
                        const ffi::AnyBuffer& ticket, const HostLane& lane,
                        std::string_view dtype_name, int64_t num_rows,
                        Dtype* dtype) {
  Error e = CheckMessage(message, lane, dtype_name, num_rows, dtype);
  if (e.empty()) e = CheckInt32("ticket", ticket, 1);
  return e;
}

inline Error CheckJoin(const ffi::AnyBuffer& ticket, const ffi::AnyBuffer& out,
                       const HostLane& lane, Dtype* dtype, int64_t* num_rows) {
  Error e = CheckInt32("ticket", ticket, 1);
  if (e.empty()) e = CheckOut(out, lane, dtype, num_rows);
  return e;
}

inline Error CheckStore(const ffi::AnyBuffer& rows, const ffi::AnyBuffer& hdr,
                        const ffi::AnyBuffer& done, const HostLane& lane,
                        Dtype* dtype, int64_t* num_rows) {
  Error e = CheckFloats("rows", rows, "[T, (N+2K)*H]", lane.row_elements(),
                        dtype, num_rows);
  if (e.empty()) e = CheckInt32("hdr", hdr, 3);
  if (e.empty()) e = CheckInt32("done", done, 1);
  return e;
}

inline Error CheckFetch(const ffi::AnyBuffer& hdr, const ffi::AnyBuffer& k,
                        const ffi::AnyBuffer& v, const HostLane& lane,
                        Dtype* dtype) {
  Error e = CheckInt32("hdr", hdr, 3);
  if (e.empty()) e = CheckScratches(k, v, lane.shape(), dtype);
  return e;
}

// A swap out, or the join of a swap in; order is what keeps its place.
inline Error CheckSwap(const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& hdr,
                       const char* name, const ffi::AnyBuffer& order,
                       const HostKVCache& cache, BlockMove* move) {
  Error e = CheckMoved(blocks, cache, move);
  if (e.empty()) e = CheckInt32("hdr", hdr, kBlockIds + move->num_blocks);
  if (e.empty()) e = CheckInt32(name, order, 1);
  return e;
}

inline Error CheckTie(const ffi::AnyBuffer& tie,
                      ffi::Result<ffi::AnyBuffer>& out) {
  if (tie.size_bytes() == out->size_bytes()) return {};
  return "tie must have the shape of its result: operand " +
         Describe(tie.element_type(), tie.dimensions()) + ", result " +
         Describe(out->element_type(), out->dimensions());
}

// No exception may leave a handler: it would cross code built without them.
template <class Fn>
ffi::Error Guarded(const char* target, Fn fn) {
  try {
    return ToFfi(target, fn());
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string(target) + ": " + e.what());
  }
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_FFI_CHECKS_H_
