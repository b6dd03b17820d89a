// The targets: what XLA calls them, what it gives and what it gets, the same on
// every platform.
#ifndef NEOJAX_CPU_PAGED_ATTN_FFI_TARGETS_H_
#define NEOJAX_CPU_PAGED_ATTN_FFI_TARGETS_H_

#include <string_view>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace neojax {

namespace ffi = ::xla::ffi;

inline constexpr char kStartTarget[] = "neojax.start.v2";
inline constexpr char kJoinTarget[] = "neojax.join.v1";
inline constexpr char kExchangeTarget[] = "neojax.exchange.v1";
inline constexpr char kStoreTarget[] = "neojax.store.v1";
inline constexpr char kStartFetchTarget[] = "neojax.start_fetch.v1";
inline constexpr char kJoinFetchTarget[] = "neojax.join_fetch.v1";
inline constexpr char kSwapOutTarget[] = "neojax.swap_out.v1";
inline constexpr char kStartSwapInTarget[] = "neojax.start_swap_in.v1";
inline constexpr char kJoinSwapInTarget[] = "neojax.join_swap_in.v1";

// Each takes ffi::Ffi::Bind(), with the platform's stream if it has one.
// Tickets and tokens called done keep calls in order; on CUDA nothing is
// written there.
template <class Binding>
auto BindStart(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // message
      .template Arg<ffi::AnyBuffer>()  // tie
      .template Attr<int64_t>("lane")
      .template Attr<int64_t>("channel")
      .template Attr<int64_t>("rows")
      .template Attr<std::string_view>("dtype")
      .template Ret<ffi::AnyBuffer>()   // ticket
      .template Ret<ffi::AnyBuffer>();  // tie
}

template <class Binding>
auto BindJoin(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // ticket
      .template Arg<ffi::AnyBuffer>()  // tie
      .template Attr<int64_t>("lane")
      .template Attr<int64_t>("channel")
      .template Ret<ffi::AnyBuffer>()   // out
      .template Ret<ffi::AnyBuffer>();  // tie
}

template <class Binding>
auto BindExchange(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // message
      .template Arg<ffi::AnyBuffer>()  // ticket
      .template Attr<int64_t>("lane")
      .template Attr<int64_t>("channel")
      .template Attr<std::string_view>("dtype")
      .template Ret<ffi::AnyBuffer>()   // out
      .template Ret<ffi::AnyBuffer>();  // ticket
}

template <class Binding>
auto BindStore(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // rows
      .template Arg<ffi::AnyBuffer>()  // hdr
      .template Arg<ffi::AnyBuffer>()  // tie
      .template Attr<int64_t>("lane")
      .template Ret<ffi::AnyBuffer>()   // done
      .template Ret<ffi::AnyBuffer>();  // tie
}

// The start of a fetch, and its join.
template <class Binding>
auto BindFetch(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // hdr
      .template Arg<ffi::AnyBuffer>()  // k_scratch
      .template Arg<ffi::AnyBuffer>()  // v_scratch
      .template Arg<ffi::AnyBuffer>()  // tie
      .template Attr<int64_t>("lane")
      .template Ret<ffi::AnyBuffer>()   // k_scratch
      .template Ret<ffi::AnyBuffer>()   // v_scratch
      .template Ret<ffi::AnyBuffer>();  // tie
}

template <class Binding>
auto BindSwapOut(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // blocks
      .template Arg<ffi::AnyBuffer>()  // hdr
      .template Attr<int64_t>("lane")
      .template Ret<ffi::AnyBuffer>();  // done
}

template <class Binding>
auto BindStartSwapIn(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // hdr
      .template Attr<int64_t>("lane")
      .template Attr<int64_t>("layers")
      .template Ret<ffi::AnyBuffer>();  // ticket
}

template <class Binding>
auto BindJoinSwapIn(Binding bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()  // ticket
      .template Arg<ffi::AnyBuffer>()  // hdr
      .template Attr<int64_t>("lane")
      .template Ret<ffi::AnyBuffer>();  // blocks
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_FFI_TARGETS_H_
