// Prefixes of chunked prefills from the arena to the caller's scratch, a layer
// ahead of its attention. Every wait here is for something that XLA's stream
// has launched before, so none can be circular.
#include <algorithm>
#include <utility>

#include "ffi/cpu_paged_attn/cuda_lane.h"

namespace neojax {

CudaLane::Prefix& CudaLane::PrefixOf(DevicePtr k, DevicePtr v) {
  for (Prefix& prefix : prefixes_) {
    if (prefix.k == k && prefix.v == v) return prefix;
  }
  return prefixes_[(last_prefix_ + 1) % kNumFetches];
}

Error CudaLane::AwaitPrefix(CudaStream stream, Prefix& prefix) {
  prefix.busy = false;
  if (report_.memory_operations) {
    return Call("cuStreamWaitEvent",
                driver_.StreamWaitEvent(stream, prefix.out, 0));
  }
  // Where host functions stand in, the driver may hold back the copies of the
  // job while one waits for it: then this call waits instead.
  if (Poll(*prefix.done, prefix.launched, WatchdogNs())) return {};
  return "the fetch has not been done for too long";
}

Error CudaLane::StartFetch(CudaStream stream, DevicePtr hdr, DevicePtr k,
                           DevicePtr v, Dtype dtype, int64_t num_slots) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  Error error = Usable();
  if (!error.empty()) return error;
  Prefix& prefix = PrefixOf(k, v);
  // Its job may still read the hdr and write to the scratch.
  if (prefix.busy) error = AwaitPrefix(stream, prefix);
  if (!error.empty()) return error;
  const uint32_t number = ++prefix.launched;
  error = Copy(stream, prefix.device_in, hdr, sizeof(Hdr));
  if (error.empty()) error = CopyDown(stream, hdrs_down_, prefix, number, 0);
  if (error.empty() && report_.memory_operations) {
    error = Await(chunks_up_, prefix, number);
    if (error.empty()) {
      error =
          Call("cuEventRecord", driver_.EventRecord(prefix.out, chunks_up_));
    }
  }
  auto job = [this, &prefix, number, k, v, dtype, num_slots,
              stores = StoresLaunched(), swaps_out = swaps_out_.launched] {
    RunFetch(prefix, number, k, v, dtype, num_slots, stores, swaps_out);
  };
  if (fetches_ == nullptr) {
    error = Queue(std::move(error), prefix, number, {HostLane::kChunks, job});
  } else {
    if (error.empty() && !fetches_->Enqueue(job)) error = "the lane is closed";
    if (!error.empty()) {
      prefix.done->store(number, std::memory_order_release);
    }
  }
  if (!error.empty()) return error;
  prefix.k = k;
  prefix.v = v;
  prefix.busy = true;
  last_prefix_ = static_cast<int>(&prefix - prefixes_.data());
  return {};
}

Error CudaLane::JoinFetch(CudaStream stream, DevicePtr k, DevicePtr v) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  Error error = Usable();
  if (!error.empty()) return error;
  Prefix& prefix = PrefixOf(k, v);
  if (prefix.k != k || prefix.v != v || !prefix.busy) {
    return "no fetch is started into this scratch; it must be passed from "
           "start to join in place";
  }
  return AwaitPrefix(stream, prefix);
}

void CudaLane::RunFetch(Prefix& prefix, uint32_t number, DevicePtr k,
                        DevicePtr v, Dtype dtype, int64_t num_slots,
                        const StoresBefore& stores, uint32_t swaps_out) {
  bool enqueued = false, announced = false;
  if (Arrived(prefix, number, "fetch")) {
    fetching_ = true;
    const Hdr hdr = LoadHdr(prefix);
    std::shared_ptr<const Plan> plan;
    Error error = lane_.ChunksToFetch(hdr, num_slots, &plan);
    bool has_prefix = false;
    for (int i = 0; error.empty() && i < hdr.n; ++i) {
      has_prefix = has_prefix || plan->chunk(i).start > 0;
    }
    if (has_prefix) {
      lane_.SleepDelay();
      error = AwaitStores(stores) && AwaitSwapsOut(swaps_out)
                  ? CopyPrefixes(*plan, hdr, k, v, dtype, &enqueued)
                  : "the stores and swaps before it do not end";
    }
    if (error.empty() && enqueued && report_.memory_operations) {
      // The copies themselves say that they are done.
      error =
          Call("cuStreamWriteValue32",
               driver_.StreamWriteValue32(copy_, prefix.done_at, number, 0));
      announced = error.empty();
    }
    if (enqueued && !announced) {
      CudaResult result = PollStream(copy_, WatchdogNs());
      if (error.empty()) error = Call("the copies of a fetch", result);
    }
    if (!error.empty()) lane_.KeepError("fetch: " + error);
    lane_.CountFetch();
  }
  fetching_ = false;
  if (!announced) prefix.done->store(number, std::memory_order_release);
}

bool CudaLane::AwaitStores(const StoresBefore& stores) const {
  for (int i = 0; i < kNumPieces; ++i) {
    if (!AwaitStore(i, stores)) return false;
  }
  return true;
}

Error CudaLane::CopyPrefixes(const Plan& plan, Hdr hdr, DevicePtr k,
                             DevicePtr v, Dtype dtype, bool* enqueued) {
  const CacheShape& shape = lane_.shape();
  const int64_t head_bytes = int64_t{shape.head_dim} * ElementSize(dtype);
  const int64_t token_bytes = shape.num_kv_heads * head_bytes;
  const int64_t piece_tokens = fetch_piece_bytes_ / (2 * token_bytes);
  for (int i = 0; i < hdr.n; ++i) {
    const Chunk& chunk = plan.chunk(i);
    const int32_t* table = plan.chunk_table(i);
    for (int64_t begin = 0; begin < chunk.start; begin += piece_tokens) {
      const int64_t count = std::min(piece_tokens, chunk.start - begin);
      FetchPiece& piece =
          fetch_pieces_[next_fetch_piece_++ % fetch_pieces_.size()];
      Error error;
      if (piece.used) {
        error = Call("cuEventQuery", PollEvent(piece.copied));
        if (!error.empty()) return error;
      }
      char* v_data = piece.data + count * token_bytes;
      // Neighbours of one head: they lie together in the arena.
      constexpr int64_t kBatch = 16;
      const int num_heads = shape.num_kv_heads;
      const auto num_items =
          static_cast<int>((count + kBatch - 1) / kBatch) * num_heads;
      auto gather = [&](int item) {
        const int head = item % num_heads;
        const int64_t first = item / num_heads * kBatch;
        const int64_t end = std::min(count, first + kBatch);
        for (int64_t t = first; t < end; ++t) {
          const auto position = static_cast<int>(begin + t);
          const int64_t at = t * token_bytes + head * head_bytes;
          lane_.cache().ReadToken(hdr.layer, table[position / shape.block_size],
                                  position % shape.block_size, head,
                                  piece.data + at, v_data + at, dtype);
        }
      };
      // While the pool attends, which takes long, this thread gathers alone.
      constexpr int kAlone = 16;
      for (int item = 0; item < num_items;) {
        if (lane_.pool().TryForEach(num_items - item,
                                    [&](int i, int) { gather(item + i); })) {
          break;
        }
        const int end = std::min(num_items, item + kAlone);
        while (item < end) gather(item++);
      }
      // XLA passes the scratch to the join, and its stream goes on from there
      // only when it is `done`.
      const int64_t at = (chunk.scratch_slot + begin) * token_bytes;
      *enqueued = piece.used = true;
      error = Call(
          "cuMemcpyHtoDAsync",
          driver_.MemcpyHtoD(k + at, piece.data, count * token_bytes, copy_));
      if (error.empty()) {
        error = Call(
            "cuMemcpyHtoDAsync",
            driver_.MemcpyHtoD(v + at, v_data, count * token_bytes, copy_));
      }
      if (error.empty()) {
        error = Call("cuEventRecord", driver_.EventRecord(piece.copied, copy_));
      }
      if (!error.empty()) return error;
    }
  }
  return {};
}

}  // namespace neojax
