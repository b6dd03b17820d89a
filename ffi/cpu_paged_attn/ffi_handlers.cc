#include "ffi/cpu_paged_attn/ffi_handlers.h"

#include <cstring>
#include <memory>
#include <string_view>

#include "ffi/cpu_paged_attn/ffi_checks.h"
#include "ffi/cpu_paged_attn/ffi_targets.h"
#include "ffi/cpu_paged_attn/lane.h"
#include "xla/ffi/api/ffi.h"

namespace neojax {
namespace {

Hdr LoadHdr(const ffi::AnyBuffer& hdr) {
  const int32_t* x = static_cast<const int32_t*>(hdr.untyped_data());
  return {x[0], x[1], x[2]};
}

const char* RowsOf(const ffi::AnyBuffer& message) {
  return static_cast<const char*>(message.untyped_data()) + kHeaderBytes;
}

// XLA does not always honour the alias of the tie (on GPUs not for a sliced
// operand, silently): its bytes must get there anyway.
Error PassTie(const ffi::AnyBuffer& tie, ffi::Result<ffi::AnyBuffer>& out,
              HostLane& lane) {
  Error e = CheckTie(tie, out);
  if (!e.empty()) return e;
  if (tie.untyped_data() != out->untyped_data()) {
    std::memmove(out->untyped_data(), tie.untyped_data(), tie.size_bytes());
    lane.CountTieCopy();
  }
  return {};
}

ffi::Error StartImpl(ffi::AnyBuffer message, ffi::AnyBuffer tie,
                     int64_t lane_id, int64_t channel, int64_t num_rows,
                     std::string_view dtype_name,
                     ffi::Result<ffi::AnyBuffer> ticket,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStartTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckStart(message, *ticket, *lane, dtype_name, num_rows, &dtype);
    if (e.empty()) e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->Start(channel, RowsOf(message), dtype, num_rows,
                       LoadHdr(message),
                       static_cast<int32_t*>(ticket->untyped_data()));
  });
}

ffi::Error JoinImpl(ffi::AnyBuffer ticket, ffi::AnyBuffer tie, int64_t lane_id,
                    int64_t channel, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kJoinTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckJoin(ticket, *out, *lane, &dtype, &num_rows);
    if (e.empty()) e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->Join(channel,
                      *static_cast<const int32_t*>(ticket.untyped_data()),
                      out->untyped_data(), dtype, num_rows);
  });
}

ffi::Error ExchangeImpl(ffi::AnyBuffer message, ffi::AnyBuffer ticket,
                        int64_t lane_id, int64_t channel,
                        std::string_view dtype_name,
                        ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::AnyBuffer> ticket_out) {
  return Guarded(kExchangeTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype started, joined;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckExchange(message, ticket, *out, *ticket_out, *lane, dtype_name,
                      &started, &joined, &num_rows);
    if (!e.empty()) return e;
    // The tickets may share their memory.
    const int32_t oldest = *static_cast<const int32_t*>(ticket.untyped_data());
    e = lane->Start(channel, RowsOf(message), started, num_rows,
                    LoadHdr(message),
                    static_cast<int32_t*>(ticket_out->untyped_data()));
    if (!e.empty()) return e;
    return lane->Join(channel, oldest, out->untyped_data(), joined, num_rows);
  });
}

ffi::Error StoreImpl(ffi::AnyBuffer rows, ffi::AnyBuffer hdr,
                     ffi::AnyBuffer tie, int64_t lane_id,
                     ffi::Result<ffi::AnyBuffer> done,
                     ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStoreTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    int64_t num_rows;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckStore(rows, hdr, *done, *lane, &dtype, &num_rows);
    if (e.empty()) e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    *static_cast<int32_t*>(done->untyped_data()) = LoadHdr(hdr).n;
    return lane->StoreRows(rows.untyped_data(), dtype, num_rows, LoadHdr(hdr));
  });
}

// Memory of the host needs no fetching ahead: the joins do it all.
ffi::Error StartFetchImpl(ffi::AnyBuffer hdr, ffi::AnyBuffer k,
                          ffi::AnyBuffer v, ffi::AnyBuffer tie, int64_t lane_id,
                          ffi::Result<ffi::AnyBuffer> k_out,
                          ffi::Result<ffi::AnyBuffer> v_out,
                          ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kStartFetchTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFetch(hdr, k, v, *lane, &dtype);
    if (e.empty()) e = PassTie(k, k_out, *lane);
    if (e.empty()) e = PassTie(v, v_out, *lane);
    if (e.empty()) e = PassTie(tie, tie_out, *lane);
    return e;
  });
}

ffi::Error JoinFetchImpl(ffi::AnyBuffer hdr, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         ffi::AnyBuffer tie, int64_t lane_id,
                         ffi::Result<ffi::AnyBuffer> k_out,
                         ffi::Result<ffi::AnyBuffer> v_out,
                         ffi::Result<ffi::AnyBuffer> tie_out) {
  return Guarded(kJoinFetchTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    Dtype dtype;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckFetch(hdr, k, v, *lane, &dtype);
    if (e.empty()) e = PassTie(k, k_out, *lane);
    if (e.empty()) e = PassTie(v, v_out, *lane);
    if (e.empty()) e = PassTie(tie, tie_out, *lane);
    if (!e.empty()) return e;
    return lane->FetchTokens(LoadHdr(hdr), k_out->untyped_data(),
                             v_out->untyped_data(), dtype, k.dimensions()[0]);
  });
}

ffi::Error SwapOutImpl(ffi::AnyBuffer blocks, ffi::AnyBuffer hdr,
                       int64_t lane_id, ffi::Result<ffi::AnyBuffer> done) {
  return Guarded(kSwapOutTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckSwap(blocks, hdr, "done", *done, lane->cache(), &move);
    if (!e.empty()) return e;
    const auto* ids = static_cast<const int32_t*>(hdr.untyped_data());
    *static_cast<int32_t*>(done->untyped_data()) = ids[1];
    return lane->SwapOut(move, ids, blocks.untyped_data());
  });
}

ffi::Error StartSwapInImpl(ffi::AnyBuffer hdr, int64_t lane_id, int64_t layers,
                           ffi::Result<ffi::AnyBuffer> ticket) {
  return Guarded(kStartSwapInTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindLane(lane_id, &lane);
    if (e.empty()) e = CheckMoveHdr(hdr, layers, &move);
    if (e.empty()) e = CheckInt32("ticket", *ticket, 1);
    if (!e.empty()) return e;
    const auto* ids = static_cast<const int32_t*>(hdr.untyped_data());
    *static_cast<int32_t*>(ticket->untyped_data()) = ids[1];
    return lane->CheckBlocks(move, ids);
  });
}

ffi::Error JoinSwapInImpl(ffi::AnyBuffer ticket, ffi::AnyBuffer hdr,
                          int64_t lane_id, ffi::Result<ffi::AnyBuffer> blocks) {
  return Guarded(kJoinSwapInTarget, [&]() -> Error {
    std::shared_ptr<HostLane> lane;
    BlockMove move;
    Error e = FindLane(lane_id, &lane);
    if (!e.empty()) return e;
    e = CheckSwap(*blocks, hdr, "ticket", ticket, lane->cache(), &move);
    if (!e.empty()) return e;
    return lane->SwapIn(move, static_cast<const int32_t*>(hdr.untyped_data()),
                        blocks->untyped_data());
  });
}

XLA_FFI_DEFINE_HANDLER(kStart, StartImpl, BindStart(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kJoin, JoinImpl, BindJoin(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kExchange, ExchangeImpl, BindExchange(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kStore, StoreImpl, BindStore(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kStartFetch, StartFetchImpl,
                       BindFetch(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kJoinFetch, JoinFetchImpl, BindFetch(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kSwapOut, SwapOutImpl, BindSwapOut(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kStartSwapIn, StartSwapInImpl,
                       BindStartSwapIn(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kJoinSwapIn, JoinSwapInImpl,
                       BindJoinSwapIn(ffi::Ffi::Bind()));

}  // namespace

std::vector<std::pair<const char*, void*>> CpuHandlers() {
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

std::pair<int, int> FfiApiVersion() {
  return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

}  // namespace neojax
