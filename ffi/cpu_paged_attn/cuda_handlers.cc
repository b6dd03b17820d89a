// The handlers of the CUDA platform: same names, operands and results as the
// CPU's. They enqueue and return. Not marked as fit for command buffers: a
// replayed graph would not call them.
#include <memory>
#include <string_view>

#include "ffi/cpu_paged_attn/cuda_lane.h"
#include "ffi/cpu_paged_attn/ffi_checks.h"
#include "ffi/cpu_paged_attn/ffi_handlers.h"
#include "ffi/cpu_paged_attn/ffi_targets.h"
#include "ffi/cpu_paged_attn/lane.h"
#include "xla/ffi/api/ffi.h"

namespace neojax {
namespace {

DevicePtr At(const ffi::AnyBuffer& buffer) {
  return reinterpret_cast<DevicePtr>(buffer.untyped_data());
}
DevicePtr At(ffi::Result<ffi::AnyBuffer>& buffer) {
  return reinterpret_cast<DevicePtr>(buffer->untyped_data());
}

Error FindCudaLane(int64_t id, std::shared_ptr<HostLane>* lane) {
  Error e = FindLane(id, lane);
  if (e.empty() && (*lane)->cuda() == nullptr) {
    e = "lane " + std::to_string(id) +
        " was made without cuda_device: it serves the CPU platform only";
  }
  return e;
}

// XLA gives a tie's result a buffer of its own where the operand is a slice.
Error PassTie(CudaStream stream, const ffi::AnyBuffer& tie,
              ffi::Result<ffi::AnyBuffer>& out, HostLane& lane) {
  Error e = CheckTie(tie, out);
  if (!e.empty() || At(tie) == At(out)) return e;
  lane.CountTieCopy();
  return lane.cuda()->Copy(stream, At(out), At(tie), tie.size_bytes());
}

ffi::Error StartImpl(CudaStream stream, ffi::AnyBuffer message,
                     ffi::AnyBuffer tie, int64_t lane_id, int64_t channel,
                     int64_t num_rows, std::string_view dtype_name,
                     ffi::Result<ffi::AnyBuffer> ticket,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStartTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckStart(message, *ticket, *lane, dtype_name, num_rows, &dtype);
    if (e.empty()) e = PassTie(stream, tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->cuda()->Start(stream, channel, At(message), dtype, num_rows);
  });
}

ffi::Error JoinImpl(CudaStream stream, ffi::AnyBuffer ticket,
                    ffi::AnyBuffer tie, int64_t lane_id, int64_t channel,
                    ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kJoinTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckJoin(ticket, *out, *lane, &dtype, &num_rows);
    if (e.empty()) e = PassTie(stream, tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->cuda()->Join(stream, channel, At(out), dtype, num_rows);
  });
}

ffi::Error ExchangeImpl(CudaStream stream, ffi::AnyBuffer message,
                        ffi::AnyBuffer ticket, int64_t lane_id, int64_t channel,
                        std::string_view dtype_name,
                        ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::AnyBuffer> ticket_out) {
  return Guarded(kExchangeTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype started, joined;
    int64_t num_rows;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckExchange(message, ticket, *out, *ticket_out, *lane, dtype_name,
                      &started, &joined, &num_rows);
    if (!e.empty()) return e;
    e = lane->cuda()->Start(stream, channel, At(message), started, num_rows);
    if (!e.empty()) return e;
    return lane->cuda()->Join(stream, channel, At(out), joined, num_rows);
  });
}

ffi::Error StoreImpl(CudaStream stream, ffi::AnyBuffer rows, ffi::AnyBuffer hdr,
                     ffi::AnyBuffer tie, int64_t lane_id,
                     ffi::Result<ffi::AnyBuffer> done,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStoreTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckStore(rows, hdr, *done, *lane, &dtype, &num_rows);
    if (e.empty()) e = PassTie(stream, tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->cuda()->StoreRows(stream, At(rows), dtype, num_rows, At(hdr));
  });
}

ffi::Error StartFetchImpl(CudaStream stream, ffi::AnyBuffer hdr,
                          ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer tie, int64_t lane_id,
                          ffi::Result<ffi::AnyBuffer> k_out,
                          ffi::Result<ffi::AnyBuffer> v_out,
                          ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStartFetchTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFetch(hdr, k, v, *lane, &dtype);
    if (e.empty()) e = PassTie(stream, k, k_out, *lane);
    if (e.empty()) e = PassTie(stream, v, v_out, *lane);
    if (e.empty()) e = PassTie(stream, tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->cuda()->StartFetch(stream, At(hdr), At(k_out), At(v_out),
                                    dtype, k.dimensions()[0]);
  });
}

ffi::Error JoinFetchImpl(CudaStream stream, ffi::AnyBuffer hdr,
                         ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer tie,
                         int64_t lane_id, ffi::Result<ffi::AnyBuffer> k_out,
                         ffi::Result<ffi::AnyBuffer> v_out,
                         ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kJoinFetchTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFetch(hdr, k, v, *lane, &dtype);
    if (e.empty()) e = lane->cuda()->JoinFetch(stream, At(k), At(v));
    if (e.empty()) e = PassTie(stream, k, k_out, *lane);
    if (e.empty()) e = PassTie(stream, v, v_out, *lane);
    if (e.empty()) e = PassTie(stream, tie, tie_out, *lane);
    return e;
  });
}

ffi::Error SwapOutImpl(CudaStream stream, ffi::AnyBuffer blocks,
                       ffi::AnyBuffer hdr, int64_t lane_id,
                       ffi::Result<ffi::AnyBuffer> done) {
  return Guarded(kSwapOutTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckSwap(blocks, hdr, "done", *done, lane->cache(), &move);
    if (!e.empty()) return e;
    return lane->cuda()->SwapOut(stream, move, At(hdr), At(blocks));
  });
}

ffi::Error StartSwapInImpl(CudaStream stream, ffi::AnyBuffer hdr,
                           int64_t lane_id, int64_t layers,
                           ffi::Result<ffi::AnyBuffer> ticket) {
  return Guarded(kStartSwapInTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindCudaLane(lane_id, &lane);
    if (e.empty()) e = CheckMoveHdr(hdr, layers, &move);
    if (e.empty()) e = CheckInt32("ticket", *ticket, 1);
    if (!e.empty()) return e;
    return lane->cuda()->StartSwapIn(stream, move, At(hdr));
  });
}

ffi::Error JoinSwapInImpl(CudaStream stream, ffi::AnyBuffer ticket,
                          ffi::AnyBuffer hdr, int64_t lane_id,
                          ffi::Result<ffi::AnyBuffer> blocks) {
  return Guarded(kJoinSwapInTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindCudaLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckSwap(*blocks, hdr, "ticket", ticket, lane->cache(), &move);
    if (!e.empty()) return e;
    return lane->cuda()->JoinSwapIn(stream, move, At(blocks));
  });
}

auto OnStream() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>();
}

XLA_FFI_DEFINE_HANDLER(kStart, StartImpl, BindStart(OnStream()));
XLA_FFI_DEFINE_HANDLER(kJoin, JoinImpl, BindJoin(OnStream()));
XLA_FFI_DEFINE_HANDLER(kExchange, ExchangeImpl, BindExchange(OnStream()));
XLA_FFI_DEFINE_HANDLER(kStore, StoreImpl, BindStore(OnStream()));
XLA_FFI_DEFINE_HANDLER(kStartFetch, StartFetchImpl, BindFetch(OnStream()));
XLA_FFI_DEFINE_HANDLER(kJoinFetch, JoinFetchImpl, BindFetch(OnStream()));
XLA_FFI_DEFINE_HANDLER(kSwapOut, SwapOutImpl, BindSwapOut(OnStream()));
XLA_FFI_DEFINE_HANDLER(kStartSwapIn, StartSwapInImpl,
                       BindStartSwapIn(OnStream()));
XLA_FFI_DEFINE_HANDLER(kJoinSwapIn, JoinSwapInImpl, BindJoinSwapIn(OnStream()));

}  // namespace

std::vector<std::pair<const char*, void*>> CudaHandlers() {
  return {
      {kStartTarget, reinterpret_cast<void*>(kStart)},
      {kJoinTarget, reinterpret_cast<void*>(kJoin)},
      {kExchangeTarget, reinterpret_cast<void*>(kExchange)},
      {kStoreTarget, reinterpret_cast<void*>(kStore)},
      {kStartFetchTarget, reinterpret_cast<void*>(kStartFetch)},
      {kJoinFetchTarget, reinterpret_cast<void*>(kJoinFetch)},
      {kSwapOutTarget, reinterpret_cast<void*>(kSwapOut)},
      {kStartSwapInTarget, reinterpret_cast<void*>(kStartSwapIn)},
      {kJoinSwapInTarget, reinterpret_cast<void*>(kJoinSwapIn)},
  };
}

}  // namespace neojax
