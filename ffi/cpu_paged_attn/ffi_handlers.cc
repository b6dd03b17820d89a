#include "ffi/cpu_paged_attn/ffi_handlers.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "ffi/cpu_paged_attn/lane.h"
#include "xla/ffi/api/ffi.h"

namespace neojax {
namespace {

namespace ffi = ::xla::ffi;

using Dims = ffi::Span<const int64_t>;

ffi::Error Refuse(const std::string& text) {
  return ffi::Error::InvalidArgument(text);
}

ffi::Error ToFfi(const char* target, const Error& error) {
  return error.empty() ? ffi::Error::Success()
                       : Refuse(std::string(target) + ": " + error);
}

std::string Describe(ffi::DataType type, Dims dims) {
  const char* name = type == ffi::F32    ? "float32"
                     : type == ffi::BF16 ? "bfloat16"
                     : type == ffi::F16  ? "float16"
                     : type == ffi::S32  ? "int32"
                                         : "another type";
  std::string out = std::string(name) + "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i ? ", " : "") + std::to_string(dims[i]);
  }
  return out + "]";
}

bool ToDtype(ffi::DataType type, Dtype* dtype) {
  *dtype = type == ffi::F32    ? Dtype::kFloat32
           : type == ffi::BF16 ? Dtype::kBFloat16
                               : Dtype::kFloat16;
  return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16;
}

constexpr char kFloatTypes[] = " must be float32, bfloat16 or float16 ";

// The checks return what is wrong, or nothing.
template <class Buffer>
Error CheckInt32(const char* name, const Buffer& buffer, int64_t size) {
  Dims dims = buffer.dimensions();
  if (buffer.element_type() == ffi::S32 && dims.size() == 1 &&
      dims[0] == size) {
    return {};
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
    return {};
  }
  return std::string(name) + kFloatTypes + letters + " with " +
         std::to_string(minor) + " columns, got " +
         Describe(buffer.element_type(), dims);
}

Error FindLane(int64_t id, std::shared_ptr<HostLane>* lane) {
  *lane = HostLane::Find(id);
  if (*lane != nullptr) return {};
  return "lane " + std::to_string(id) + " does not exist or is closed";
}

Hdr LoadHdr(const ffi::AnyBuffer& hdr) {
  const int32_t* x = static_cast<const int32_t*>(hdr.untyped_data());
  return {x[0], x[1], x[2]};
}

// XLA does not always honour the alias of the tie (on GPUs not for a sliced
// operand, silently): its bytes must get there anyway.
Error PassTie(const ffi::AnyBuffer& tie, ffi::Result<ffi::AnyBuffer>& out,
              HostLane& lane) {
  if (tie.size_bytes() != out->size_bytes()) {
    return "tie must have the shape of its result: operand " +
           Describe(tie.element_type(), tie.dimensions()) + ", result " +
           Describe(out->element_type(), out->dimensions());
  }
  if (tie.untyped_data() != out->untyped_data()) {
    std::memmove(out->untyped_data(), tie.untyped_data(), tie.size_bytes());
    lane.CountTieCopy();
  }
  return {};
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

ffi::Error StartImpl(ffi::AnyBuffer rows, ffi::AnyBuffer hdr,
                     ffi::AnyBuffer tie, int64_t lane_id, int64_t channel,
                     ffi::Result<ffi::AnyBuffer> ticket,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded("neojax.start.v1", [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFloats("rows", rows, "[B, (N+2K)*H]", lane->row_elements(), &dtype,
                    &num_rows);
    if (!e.empty()) return e;
    e = CheckInt32("hdr", hdr, 3);
    if (!e.empty()) return e;
    e = CheckInt32("ticket", *ticket, 1);
    if (!e.empty()) return e;
    e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->Start(channel, rows.untyped_data(), dtype, num_rows,
                       LoadHdr(hdr),
                       static_cast<int32_t*>(ticket->untyped_data()));
  });
}

ffi::Error JoinImpl(ffi::AnyBuffer ticket, ffi::AnyBuffer tie, int64_t lane_id,
                    int64_t channel, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded("neojax.join.v1", [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckInt32("ticket", ticket, 1);
    if (!e.empty()) return e;
    e = CheckFloats(
        "out", *out, "[B, N*H]",
        int64_t{lane->options().num_q_heads} * lane->shape().head_dim, &dtype,
        &num_rows);
    if (!e.empty()) return e;
    e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->Join(channel,
                      *static_cast<const int32_t*>(ticket.untyped_data()),
                      out->untyped_data(), dtype, num_rows);
  });
}

ffi::Error StoreImpl(ffi::AnyBuffer rows, ffi::AnyBuffer hdr,
                     ffi::AnyBuffer tie, int64_t lane_id,
                     ffi::Result<ffi::AnyBuffer> done,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded("neojax.store.v1", [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFloats("rows", rows, "[T, (N+2K)*H]", lane->row_elements(), &dtype,
                    &num_rows);
    if (!e.empty()) return e;
    e = CheckInt32("hdr", hdr, 3);
    if (!e.empty()) return e;
    e = CheckInt32("done", *done, 1);
    if (!e.empty()) return e;
    e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    *static_cast<int32_t*>(done->untyped_data()) = LoadHdr(hdr).n;
    return lane->StoreRows(rows.untyped_data(), dtype, num_rows, LoadHdr(hdr));
  });
}

ffi::Error FetchImpl(ffi::AnyBuffer hdr, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     int64_t lane_id, ffi::Result<ffi::AnyBuffer> k_out,
                     ffi::Result<ffi::AnyBuffer> v_out) {
  return Guarded("neojax.fetch.v1", [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckInt32("hdr", hdr, 3);
    if (!e.empty()) return e;
    const CacheShape& shape = lane->shape();
    Dtype dtype;
    auto check = [&](const char* name, const ffi::AnyBuffer& x) -> Error {
      Dims dims = x.dimensions();
      if (ToDtype(x.element_type(), &dtype) && dims.size() == 3 &&
          dims[1] == shape.num_kv_heads && dims[2] == shape.head_dim) {
        return {};
      }
      return std::string(name) + kFloatTypes + "[S, " +
             std::to_string(shape.num_kv_heads) + ", " +
             std::to_string(shape.head_dim) + "], got " +
             Describe(x.element_type(), dims);
    };
    e = check("k_scratch", k);
    if (!e.empty()) return e;
    e = check("v_scratch", v);
    if (!e.empty()) return e;
    if (k.element_type() != v.element_type() ||
        k.dimensions()[0] != v.dimensions()[0]) {
      return "v_scratch must be like k_scratch";
    }
    e = PassTie(k, k_out, *lane);
    if (!e.empty()) return e;
    e = PassTie(v, v_out, *lane);
    if (!e.empty()) return e;
    return lane->FetchTokens(
        LoadHdr(hdr), k_out->untyped_data(), v_out->untyped_data(),
        k.element_type() == ffi::F32 ? Dtype::kFloat32 : Dtype::kBFloat16,
        k.dimensions()[0]);
  });
}

XLA_FFI_DEFINE_HANDLER(kStart, StartImpl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // rows
                           .Arg<ffi::AnyBuffer>()  // hdr
                           .Arg<ffi::AnyBuffer>()  // tie
                           .Attr<int64_t>("lane")
                           .Attr<int64_t>("channel")
                           .Ret<ffi::AnyBuffer>()    // ticket
                           .Ret<ffi::AnyBuffer>());  // tie

XLA_FFI_DEFINE_HANDLER(kJoin, JoinImpl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // ticket
                           .Arg<ffi::AnyBuffer>()  // tie
                           .Attr<int64_t>("lane")
                           .Attr<int64_t>("channel")
                           .Ret<ffi::AnyBuffer>()    // out
                           .Ret<ffi::AnyBuffer>());  // tie

XLA_FFI_DEFINE_HANDLER(kStore, StoreImpl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // rows
                           .Arg<ffi::AnyBuffer>()  // hdr
                           .Arg<ffi::AnyBuffer>()  // tie
                           .Attr<int64_t>("lane")
                           .Ret<ffi::AnyBuffer>()    // done
                           .Ret<ffi::AnyBuffer>());  // tie

XLA_FFI_DEFINE_HANDLER(kFetch, FetchImpl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // hdr
                           .Arg<ffi::AnyBuffer>()  // k_scratch
                           .Arg<ffi::AnyBuffer>()  // v_scratch
                           .Attr<int64_t>("lane")
                           .Ret<ffi::AnyBuffer>()    // k_scratch
                           .Ret<ffi::AnyBuffer>());  // v_scratch

}  // namespace

std::vector<std::pair<const char*, void*>> CpuHandlers() {
  return {
      {"neojax.start.v1", reinterpret_cast<void*>(kStart)},
      {"neojax.join.v1", reinterpret_cast<void*>(kJoin)},
      {"neojax.store.v1", reinterpret_cast<void*>(kStore)},
      {"neojax.fetch.v1", reinterpret_cast<void*>(kFetch)},
  };
}

std::pair<int, int> FfiApiVersion() {
  return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

}  // namespace neojax
