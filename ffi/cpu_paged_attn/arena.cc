#include "ffi/cpu_paged_attn/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace neojax {
namespace {

// Where element `d` of token `t` lies in a tile's K and V.
template <class E>
struct Place {
  static int K(int t, int d, int) { return d * 16 + t; }
  static int V(int t, int d, int head_dim) { return t * head_dim + d; }
};

template <>
struct Place<Bf16> {
  static int K(int t, int d, int) { return (d / 2 * 16 + t) * 2 + d % 2; }
  static int V(int t, int d, int head_dim) {
    return (t / 2 * head_dim + d) * 2 + t % 2;
  }
};

template <class To, class From>
void Convert(To* to, From from) {
  if constexpr (std::is_same_v<To, From>) {
    *to = from;  // bit by bit: a signalling NaN stays one
  } else {
    Assign(to, ToFloat(from));
  }
}

template <class E, class Row>
void Write(E* tile, int t, int head_dim, const Row* k, const Row* v) {
  E* v_tile = tile + 16 * head_dim;
  for (int d = 0; d < head_dim; ++d) {
    Convert(tile + Place<E>::K(t, d, head_dim), k[d]);
    Convert(v_tile + Place<E>::V(t, d, head_dim), v[d]);
  }
}

template <class E, class Row>
void Read(const E* tile, int t, int head_dim, Row* k, Row* v) {
  const E* v_tile = tile + 16 * head_dim;
  for (int d = 0; d < head_dim; ++d) {
    Convert(k + d, tile[Place<E>::K(t, d, head_dim)]);
    Convert(v + d, v_tile[Place<E>::V(t, d, head_dim)]);
  }
}

// Calls fn(element, row) with null pointers of the two C++ types.
template <class Fn>
void WithTypes(Dtype cache, Dtype rows, Fn fn) {
  WithType(cache, [&](auto* element) {
    WithType(rows, [&](auto* row) { fn(element, row); });
  });
}

std::string Gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f",
                static_cast<double>(bytes) / (1 << 30));
  return text;
}

// Makes pages real. False, with errno, if there is no memory for them; older
// kernels cannot say so and end the process instead.
bool Touch(char* begin, int64_t size) {
  // Whole pages: a neighbour's stretch may begin within the last one.
  const int64_t before = reinterpret_cast<uintptr_t>(begin) % 4096;
  begin -= before;
  size += before;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  if (madvise(begin, size, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return false;
  for (int64_t i = 0; i < size; i += 4096) {
    *static_cast<volatile char*>(begin + i) = 0;
  }
  return true;
}

}  // namespace

void CheckShape(const CacheShape& s) {
  auto check = [](bool ok, const char* name, int value, const char* rule) {
    if (!ok) {
      throw std::invalid_argument(std::string(name) + " must be " + rule +
                                  ", got " + std::to_string(value));
    }
  };
  check(s.num_layers >= 1, "num_layers", s.num_layers, "at least 1");
  check(s.num_blocks >= 1, "num_blocks", s.num_blocks, "at least 1");
  check(s.num_kv_heads >= 1, "num_kv_heads", s.num_kv_heads, "at least 1");
  check(s.head_dim >= 8 && s.head_dim <= 256 && s.head_dim % 8 == 0, "head_dim",
        s.head_dim, "a multiple of 8 up to 256");
  check(s.block_size >= 16 && s.block_size % 16 == 0, "block_size",
        s.block_size, "a multiple of 16");
}

HostKVCache::HostKVCache(const CacheShape& shape,
                         std::shared_ptr<WorkerPool> pool)
    : shape_(shape), pool_(std::move(pool)), num_nodes_(pool_->num_nodes()) {
  CheckShape(shape_);
  const int64_t bytes = shape_.num_bytes();
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw std::runtime_error("mapping " + Gib(bytes) + " GiB for the host's " +
                             "KV cache failed: " + std::strerror(errno));
  }
  data_ = static_cast<char*>(data);
  // Advice only: a kernel without huge pages is merely slower.
  madvise(data_, bytes, MADV_HUGEPAGE);

  try {
    TouchAll();
  } catch (...) {
    munmap(data_, bytes);
    throw;
  }
}

void HostKVCache::TouchAll() {
  const int64_t bytes = shape_.num_bytes();
  const int64_t start = NowNs();
  constexpr int64_t kPiece = int64_t{32} << 20;
  // Pieces of a node, layer by layer; each node's threads take its own.
  std::atomic<int64_t> next[kMaxNodes] = {};
  std::atomic<int64_t> touched{0};
  std::atomic<int> failure{0};
  auto touch = [&](int node) {
    const int64_t first = FirstBlock(shape_, num_nodes_, node);
    const int64_t layer_size =
        (FirstBlock(shape_, num_nodes_, node + 1) - first) *
        shape_.block_bytes();
    const int64_t pieces = (layer_size + kPiece - 1) / kPiece;
    while (failure.load(std::memory_order_relaxed) == 0) {
      const int64_t i = next[node].fetch_add(1, std::memory_order_relaxed);
      if (i >= pieces * shape_.num_layers) return;
      const int64_t at = i % pieces * kPiece;
      const int64_t size = std::min(kPiece, layer_size - at);
      char* begin = data_ + i / pieces * shape_.layer_bytes() +
                    first * shape_.block_bytes() + at;
      if (!Touch(begin, size)) {
        failure.store(errno, std::memory_order_relaxed);
        return;
      }
      touched.fetch_add(size, std::memory_order_relaxed);
    }
  };
  {
    KeepAffinity keep;  // the caller is one of the workers
    pool_->Run(pool_->num_threads(), [&](int worker) {
      if (worker == 0) pool_->Bind(0);
      touch(pool_->node_of(worker));
    });
  }
  // A closed pool has no thread on other nodes.
  for (int node = 0; node < num_nodes_; ++node) touch(node);
  if (failure != 0) {
    throw std::runtime_error(
        "the machine gave " + Gib(touched) + " of " + Gib(bytes) +
        " GiB for the host's KV cache: " + std::strerror(failure));
  }
  touch_seconds_ = (NowNs() - start) * 1e-9;
}

HostKVCache::~HostKVCache() { munmap(data_, shape_.num_bytes()); }

void HostKVCache::WriteToken(int layer, int block, int slot, int head,
                             const void* k, const void* v, Dtype dtype) {
  char* tile = Tile(layer, block, slot, head);
  WithTypes(shape_.dtype, dtype, [&](auto* element, auto* row) {
    using E = std::remove_pointer_t<decltype(element)>;
    using Row = std::remove_pointer_t<decltype(row)>;
    Write(reinterpret_cast<E*>(tile), slot % 16, shape_.head_dim,
          static_cast<const Row*>(k), static_cast<const Row*>(v));
  });
}

void HostKVCache::ReadToken(int layer, int block, int slot, int head, void* k,
                            void* v, Dtype dtype) const {
  const char* tile = Tile(layer, block, slot, head);
  WithTypes(shape_.dtype, dtype, [&](auto* element, auto* row) {
    using E = std::remove_pointer_t<decltype(element)>;
    using Row = std::remove_pointer_t<decltype(row)>;
    Read(reinterpret_cast<const E*>(tile), slot % 16, shape_.head_dim,
         static_cast<Row*>(k), static_cast<Row*>(v));
  });
}

void HostKVCache::Fill(float value) {
  int64_t count = shape_.num_bytes() / ElementSize(shape_.dtype);
  for (int64_t i = 0; i < count; ++i) {
    StoreFloat(data_, shape_.dtype, i, value);
  }
}

}  // namespace neojax
