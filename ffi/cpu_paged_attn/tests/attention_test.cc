// Kernels of every available instruction set against a double-precision
// reference, in a cache whose unused slots hold NaN.
#include "ffi/cpu_paged_attn/attention.h"

#include <sched.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "ffi/cpu_paged_attn/isa.h"
#include "ffi/cpu_paged_attn/tests/check.h"
#include "ffi/cpu_paged_attn/topology.h"

namespace neojax {
namespace {

struct Problem {
  CacheShape shape;
  int num_q_heads;
  std::vector<int32_t> lens, tables;
  int width;
  std::vector<float> q, k, v;  // q [B, N, H]; k, v [tokens, K, H]
  std::shared_ptr<WorkerPool> pool;
  std::unique_ptr<HostKVCache> cache;
  std::vector<char> rows;  // [B, (N+2K)*H] of the cache's dtype

  Problem(CacheShape s, int group, std::vector<int32_t> context_lens,
          int num_threads, unsigned seed)
      : shape(s), num_q_heads(group * s.num_kv_heads), lens(context_lens) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    auto rounded = [&] {
      float x = normal(rng);
      StoreFloat(&x, shape.dtype, 0, x);
      return LoadFloat(&x, shape.dtype, 0);
    };
    int longest = *std::max_element(lens.begin(), lens.end());
    width = (longest + shape.block_size - 1) / shape.block_size;
    shape.num_blocks = width * static_cast<int>(lens.size()) + 1;
    std::vector<int32_t> order(shape.num_blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    tables.assign(order.begin(), order.begin() + width * lens.size());

    pool = std::make_shared<WorkerPool>(num_threads);
    cache = std::make_unique<HostKVCache>(shape, pool);
    cache->Fill(std::numeric_limits<float>::quiet_NaN());
    const int row_elements =
        (num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim;
    rows.resize(lens.size() * row_elements * ElementSize(shape.dtype));
    for (size_t row = 0; row < lens.size(); ++row) {
      for (int i = 0; i < num_q_heads * shape.head_dim; ++i) {
        q.push_back(rounded());
        StoreFloat(rows.data(), shape.dtype, row * row_elements + i, q.back());
      }
      for (int t = 0; t < lens[row]; ++t) {
        size_t first = k.size();
        for (int i = 0; i < shape.num_kv_heads * shape.head_dim; ++i) {
          k.push_back(rounded());
          v.push_back(rounded());
        }
        bool is_new = t == lens[row] - 1;
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          const float* from_k = &k[first + head * shape.head_dim];
          const float* from_v = &v[first + head * shape.head_dim];
          if (!is_new) {
            cache->WriteToken(1, tables[row * width + t / shape.block_size],
                              t % shape.block_size, head, from_k, from_v,
                              Dtype::kFloat32);
          }
          for (int d = 0; is_new && d < shape.head_dim; ++d) {
            int64_t at =
                row * row_elements + (num_q_heads + head) * shape.head_dim + d;
            StoreFloat(rows.data(), shape.dtype, at, from_k[d]);
            StoreFloat(rows.data(), shape.dtype,
                       at + shape.num_kv_heads * shape.head_dim, from_v[d]);
          }
        }
      }
    }
  }

  // Relative L2 error of one call, log-sum-exp included in the check.
  double Error(const KernelTable& kernels, float softcap, int window) {
    AttentionParams params{num_q_heads,
                           1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
                           softcap};
    Plan plan(shape, num_q_heads, lens.data(),
              {tables.data(), static_cast<int>(lens.size()), width}, window,
              nullptr, {nullptr, 0, 0});
    std::vector<char> out(lens.size() * num_q_heads * shape.head_dim *
                          ElementSize(shape.dtype));
    std::vector<float> lse(lens.size() * num_q_heads);
    Attend(*cache, *pool, kernels, params, plan,
           {rows.data(), shape.dtype, 1, static_cast<int>(lens.size()), true,
            out.data(), lse.data()});
    double error = 0, norm = 0;
    int64_t first_token = 0;
    const int head_dim = shape.head_dim;
    const int group = num_q_heads / shape.num_kv_heads;
    for (size_t row = 0; row < lens.size(); ++row) {
      int begin = window > 0 ? std::max(0, lens[row] - window) : 0;
      for (int n = 0; n < num_q_heads; ++n) {
        const float* query = &q[(row * num_q_heads + n) * head_dim];
        std::vector<double> want(head_dim, 0.0);
        auto at = [&](int t) {
          return ((first_token + t) * shape.num_kv_heads + n / group) *
                 head_dim;
        };
        std::vector<double> logits;
        for (int t = begin; t < lens[row]; ++t) {
          double x = 0;
          for (int d = 0; d < head_dim; ++d) {
            x += double{query[d]} * k[at(t) + d];
          }
          x *= params.scale;
          logits.push_back(softcap > 0 ? softcap * std::tanh(x / softcap) : x);
        }
        double max = *std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (size_t i = 0; i < logits.size(); ++i) {
          double weight = std::exp(logits[i] - max);
          sum += weight;
          for (int d = 0; d < head_dim; ++d) {
            want[d] += weight * v[at(begin + static_cast<int>(i)) + d];
          }
        }
        CHECK(std::abs(lse[row * num_q_heads + n] - (max + std::log(sum))) <
              1e-4);
        for (int d = 0; d < head_dim; ++d) {
          double got = LoadFloat(
              out.data(), shape.dtype,
              (row * num_q_heads + n) * static_cast<int64_t>(head_dim) + d);
          error += (got - want[d] / sum) * (got - want[d] / sum);
          norm += want[d] / sum * want[d] / sum;
        }
      }
      first_token += lens[row];
    }
    return std::sqrt(error / norm);
  }
};

void TestEveryShapeAgreesWithTheReference() {
  unsigned seed = 0;
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    for (int head_dim : {8, 24, 40, 64, 80, 128, 256}) {
      for (int group : {1, 3, 4, 5, 7, 8, 32}) {
        int block_size = seed % 2 == 0 ? 16 : 48;
        int num_threads = 1 + seed % 3;
        Problem problem({2, 0, 2, head_dim, block_size, dtype}, group,
                        {1, 15, 16, 17, 200}, num_threads, ++seed);
        for (const KernelTable* kernels : AvailableKernels()) {
          double error = problem.Error(*kernels, seed % 5 == 0 ? 2.0f : 0.0f,
                                       seed % 4 == 0 ? 21 : 0);
          double limit = dtype == Dtype::kFloat32    ? 2e-6
                         : dtype == Dtype::kBFloat16 ? 4e-3
                                                     : 1e-3;
          if (!(error <= limit)) {
            std::fprintf(stderr, "%s %s H=%d G=%d: error %g\n", kernels->name,
                         DtypeName(dtype), head_dim, group, error);
            CHECK(false);
          }
        }
      }
    }
  }
}

void TestManyHeadsOfOneGroupAreTakenInTurns() {
  Problem problem({2, 0, 1, 16, 16, Dtype::kFloat32}, 71, {300, 3}, 2, 1);
  CHECK(problem.Error(KernelsFor(""), 0.0f, 0) <= 2e-6);
}

void TestLongSequencesAreSplit() {
  Problem problem({2, 0, 1, 32, 16, Dtype::kFloat32}, 4, {5000, 1, 1025}, 3, 1);
  Plan plan(problem.shape, 4, problem.lens.data(),
            {problem.tables.data(), 3, problem.width}, 0, nullptr,
            {nullptr, 0, 0});
  CHECK(plan.num_items(0, 1) > 50);
  int next = 0;
  for (int i = 0; i < plan.num_items(0, 1); ++i) {
    CHECK(plan.items(0)[i].begin == next);
    next = plan.items(0)[i].end;
  }
  CHECK(next == 5000);
  CHECK(problem.Error(KernelsFor(""), 0.0f, 0) <= 2e-6);
}

void TestBadTablesAreRefused() {
  CacheShape shape{1, 4, 1, 8, 16, Dtype::kFloat32};
  int32_t len = 33;
  std::vector<int32_t> table = {0, 1, 4};
  auto plan = [&] {
    Plan(shape, 1, &len, {table.data(), 1, 3}, 0, nullptr, {nullptr, 0, 0});
  };
  CheckThrows("tables[0, 2] is block 4", plan);
  table[2] = -1;
  CheckThrows("tables[0, 2] is block -1", plan);
  len = 49;
  CheckThrows("49 tokens need 4", plan);
  len = 0;
  CheckThrows("context_lens[0] must be at least 1", plan);
  len = 2147483647;
  CheckThrows("tables[0] has 3 blocks", plan);
  len = 16;
  table[0] = 0;
  const auto* odd = reinterpret_cast<const int32_t*>(
      reinterpret_cast<const char*>(table.data()) + 2);
  CheckThrows("tables must lie at a multiple of 4 bytes, is 2 past one", [&] {
    Plan(shape, 1, &len, {odd, 1, 1}, 0, nullptr, {nullptr, 0, 0});
  });
  CheckThrows("head_dim must be a multiple of 8",
              [] { CheckShape({1, 1, 1, 20, 16, Dtype::kFloat32}); });
  CheckThrows("num_q_heads must be a multiple of the 2", [] {
    CheckParams({1, 1, 2, 8, 16, Dtype::kFloat32}, {3, 1.0f, 0.0f});
  });
}

template <class T>
int Bits(float x) {
  T rounded;
  Assign(&rounded, x);
  return rounded.bits;
}

void TestRoundingIsToNearestEven() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(Bits<Bf16>(1.0f) == 0x3f80);
  CHECK(Bits<Bf16>(1.00390625f) == 0x3f80);  // half way, to even
  CHECK(Bits<Bf16>(1.01171875f) == 0x3f82);  // half way, to even
  CHECK(Bits<Bf16>(3.4e38f) == 0x7f80);
  CHECK(std::isnan(ToFloat(Bf16{static_cast<uint16_t>(Bits<Bf16>(nan))})));
  CHECK(Bits<F16>(1.0f) == 0x3c00);
  CHECK(Bits<F16>(-2.0f) == 0xc000);
  CHECK(Bits<F16>(1.00048828125f) == 0x3c00);  // half way, to even
  CHECK(Bits<F16>(1.00146484375f) == 0x3c02);  // half way, to even
  CHECK(Bits<F16>(65504.0f) == 0x7bff);
  CHECK(Bits<F16>(65519.0f) == 0x7bff);
  CHECK(Bits<F16>(65520.0f) == 0x7c00);
  CHECK(Bits<F16>(0x1p-24f) == 0x0001);
  CHECK(Bits<F16>(0x1p-25f) == 0x0000);    // half way, to even
  CHECK(Bits<F16>(0x1.8p-24f) == 0x0002);  // half way, to even
  CHECK(Bits<F16>(nan) == 0x7e00);
  // Every float16 survives the way to float32 and back.
  for (int bits = 0; bits < 0x10000; ++bits) {
    F16 half{static_cast<uint16_t>(bits)};
    float wide = ToFloat(half);
    CHECK(std::isnan(wide) ? (bits & 0x7c00) == 0x7c00
                           : Bits<F16>(wide) == bits);
  }
}

void TestNumaNodesAreReadFromSysfs() {
  CHECK((ParseCores("0-2,5\n") == std::vector<int>{0, 1, 2, 5}));
  CHECK(ParseCores("").empty());
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
  int core = 0;
  while (!CPU_ISSET(core, &set)) ++core;

  char root[] = "/tmp/neojax_sysfs_XXXXXX";
  CHECK(mkdtemp(root) != nullptr);
  const std::string nodes = std::string(root) + "/devices/system/node";
  for (const char* name : {"/node0", "/node1", "/node2"}) {
    std::filesystem::create_directories(nodes + name);
  }
  const std::string usable = std::to_string(core);
  auto write = [&](const char* name, const std::string& text) {
    std::ofstream(nodes + name) << text << "\n";
  };
  write("/online", "0-2");
  write("/node0/cpulist", usable);
  write("/node1/cpulist", "1000-1001");  // not ours
  write("/node2/cpulist", usable + ",1001");
  CHECK((NumaNodes(root) == std::vector<std::vector<int>>{{core}, {core}}));
  write("/node2/cpulist", "");
  CHECK(NumaNodes(root).empty());  // one node is nothing to tell apart
  CHECK(NumaNodes(std::string(root) + "/none").empty());
  std::filesystem::remove_all(root);
}

void TestEveryItemsBlocksAreOnOneNode() {
  CacheShape shape{1, 100, 2, 8, 16, Dtype::kFloat32};
  const int num_nodes = 3;
  CHECK(FirstBlock(shape, num_nodes, 0) == 0);
  CHECK(FirstBlock(shape, num_nodes, num_nodes) == shape.num_blocks);
  for (int node = 0; node < num_nodes; ++node) {
    const int first = FirstBlock(shape, num_nodes, node);
    CHECK(NodeOfBlock(shape, num_nodes, first) == node);
    CHECK(first == 0 || NodeOfBlock(shape, num_nodes, first - 1) == node - 1);
  }
  std::vector<int32_t> order(100), lens = {1500, 70, 1};
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  std::vector<int32_t> tables(3 * 94);
  std::copy(order.begin(), order.begin() + 94, tables.begin());
  std::copy(order.begin() + 94, order.begin() + 99, tables.begin() + 94);
  tables[2 * 94] = order[99];
  Plan plan(shape, 2, lens.data(), {tables.data(), 3, 94}, 0, nullptr,
            {nullptr, 0, 0}, num_nodes);
  std::vector<int> tokens(3), newest(3);
  for (int node = 0; node < num_nodes; ++node) {
    CHECK(plan.num_items(node, 0) == 0);
    CHECK(plan.num_items(node, 3) == static_cast<int>(plan.items(node).size()));
    for (const Item& item : plan.items(node)) {
      CHECK(item.begin < item.end);
      for (int t = item.begin; t < item.end; ++t) {
        const int block = plan.blocks(item)[t / shape.block_size];
        CHECK(NodeOfBlock(shape, num_nodes, block) == node);
      }
      tokens[item.row] += item.end - item.begin;
      newest[item.row] += item.is_last;
    }
  }
  for (int row = 0; row < 3; ++row) {
    CHECK(tokens[row] == lens[row] * shape.num_kv_heads);
    CHECK(newest[row] == shape.num_kv_heads);
  }
}

}  // namespace
}  // namespace neojax

int main() {
  neojax::TestNumaNodesAreReadFromSysfs();
  neojax::TestEveryItemsBlocksAreOnOneNode();
  neojax::TestEveryShapeAgreesWithTheReference();
  neojax::TestManyHeadsOfOneGroupAreTakenInTurns();
  neojax::TestLongSequencesAreSplit();
  neojax::TestBadTablesAreRefused();
  neojax::TestRoundingIsToNearestEven();
}
