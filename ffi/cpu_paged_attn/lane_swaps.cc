// Whole blocks between programs and the arena, on the CPU platform, and what
// both platforms check first. A block arrives and leaves as the arena holds
// it: the program packs and unpacks.
#include <cstring>

#include "ffi/cpu_paged_attn/lane.h"

namespace neojax {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

}  // namespace

Error HostLane::CheckBlocks(const BlockMove& move, const int32_t* hdr) const {
  const int32_t layer = hdr[0], n = hdr[1];
  if (layer < 0 || layer + move.num_layers > shape().num_layers) {
    return "hdr[0] is layer " + Text(layer) + ", the first of " +
           Text(move.num_layers) + "; the arena has " +
           Text(shape().num_layers);
  }
  if (n < 0 || n > move.num_blocks) {
    return "hdr[1] is n=" + Text(n) + "; there is room for " +
           Text(move.num_blocks) + " blocks";
  }
  for (int i = 0; i < n; ++i) {
    const int32_t block = hdr[kBlockIds + i];
    if (block < 0 || block >= shape().num_blocks) {
      return "hdr[" + Text(kBlockIds + i) + "] is block " + Text(block) +
             "; the arena has " + Text(shape().num_blocks);
    }
  }
  return {};
}

Error HostLane::BeginMove() {
  Error failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure.swap(fail_next_);
  }
  SleepDelay();
  return failure;
}

void HostLane::CountMove(bool out, int64_t blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  (out ? counters_.blocks_out : counters_.blocks_in) += blocks;
}

void HostLane::CopyBlocks(const BlockMove& move, const int32_t* hdr,
                          char* blocks, bool out) {
  const int64_t bytes = shape().block_bytes();
  const int n = hdr[1];
  pool_->ForEach(move.num_layers * n, [&](int i, int) {
    const int layer = i / n, block = i % n;
    char* here = blocks + (int64_t{layer} * move.num_blocks + block) * bytes;
    char* there = cache_->Block(hdr[0] + layer, hdr[kBlockIds + block]);
    std::memcpy(out ? there : here, out ? here : there, bytes);
  });
}

Error HostLane::SwapOut(const BlockMove& move, const int32_t* hdr,
                        const void* blocks) {
  return Move(move, hdr, static_cast<char*>(const_cast<void*>(blocks)), true);
}

Error HostLane::SwapIn(const BlockMove& move, const int32_t* hdr,
                       void* blocks) {
  return Move(move, hdr, static_cast<char*>(blocks), false);
}

Error HostLane::Move(const BlockMove& move, const int32_t* hdr, char* blocks,
                     bool out) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return "lane " + Text(id_) + " is closed";
  }
  Error error = CheckBlocks(move, hdr);
  if (!error.empty() || hdr[1] == 0) return error;
  // As on a device, where it is found after the call: the lane's error.
  Error failure = BeginMove();
  if (!failure.empty()) {
    KeepError((out ? "swap out: " : "swap in: ") + failure);
    return {};
  }
  CopyBlocks(move, hdr, blocks, out);
  CountMove(out, int64_t{move.num_layers} * hdr[1]);
  return {};
}

}  // namespace neojax
