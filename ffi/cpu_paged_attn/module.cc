// nanobind module neojax._cpu_paged_attn: numpy in, numpy out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cpu_paged_attn/arena.h"
#include "ffi/cpu_paged_attn/attention.h"
#include "ffi/cpu_paged_attn/bench.h"
#include "ffi/cpu_paged_attn/cpu_count.h"
#include "ffi/cpu_paged_attn/cuda_driver.h"
#include "ffi/cpu_paged_attn/cuda_lane.h"
#include "ffi/cpu_paged_attn/ffi_handlers.h"
#include "ffi/cpu_paged_attn/isa.h"
#include "ffi/cpu_paged_attn/lane.h"
#include "ffi/cpu_paged_attn/numpy_arrays.h"
#include "ffi/cpu_paged_attn/topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neojax {
namespace {

void CheckLayer(const CacheShape& shape, int layer) {
  if (layer < 0 || layer >= shape.num_layers) {
    throw std::invalid_argument("layer must be below " +
                                std::to_string(shape.num_layers) + ", got " +
                                std::to_string(layer));
  }
}

// Checks that tokens [start, start + n) lie in blocks of the arena; a plan of
// one chunk does exactly that.
void CheckTokens(const CacheShape& shape, int layer, const Ints1& table,
                 int64_t start, int64_t n) {
  CheckLayer(shape, layer);
  if (start < 0 || n < 0 || start + n > INT32_MAX) {
    throw std::invalid_argument(
        "start and the number of tokens must be 0 or "
        "more, got " +
        std::to_string(start) + " and " + std::to_string(n));
  }
  int32_t chunk[4] = {0, static_cast<int32_t>(n), static_cast<int32_t>(start),
                      0};
  Plan(shape, shape.num_kv_heads, nullptr, {nullptr, 0, 0}, 0, chunk,
       {table.data(), 1, static_cast<int>(table.shape(0))});
}

void WriteTokens(HostKVCache& cache, int layer, const Ints1& table,
                 int64_t start, nb::handle k_array, nb::handle v_array) {
  const CacheShape& shape = cache.shape();
  Floats k("k", k_array), v("v", v_array);
  int64_t n = k.shape().empty() ? 0 : k.shape()[0];
  k.CheckShape("k", "[n, K, H]", {n, shape.num_kv_heads, shape.head_dim});
  v.CheckShape("v", "[n, K, H]", {n, shape.num_kv_heads, shape.head_dim});
  if (k.dtype() != v.dtype()) {
    throw std::invalid_argument("v must have the dtype of k");
  }
  CheckTokens(shape, layer, table, start, n);
  const int32_t* blocks = table.data();
  nb::gil_scoped_release release;
  const int64_t row = shape.head_dim * ElementSize(k.dtype());
  for (int64_t i = 0; i < n * shape.num_kv_heads; ++i) {
    int64_t position = start + i / shape.num_kv_heads;
    cache.WriteToken(layer, blocks[position / shape.block_size],
                     static_cast<int>(position % shape.block_size),
                     static_cast<int>(i % shape.num_kv_heads),
                     static_cast<const char*>(k.data()) + i * row,
                     static_cast<const char*>(v.data()) + i * row, k.dtype());
  }
}

nb::tuple ReadTokens(const HostKVCache& cache, int layer, const Ints1& table,
                     int64_t start, int64_t n) {
  const CacheShape& shape = cache.shape();
  CheckTokens(shape, layer, table, start, n);
  std::vector<int64_t> dims = {n, shape.num_kv_heads, shape.head_dim};
  NewArray k = MakeArray(shape.dtype, dims), v = MakeArray(shape.dtype, dims);
  const int32_t* blocks = table.data();
  {
    nb::gil_scoped_release release;
    const int64_t row = shape.head_dim * ElementSize(shape.dtype);
    for (int64_t i = 0; i < n * shape.num_kv_heads; ++i) {
      int64_t position = start + i / shape.num_kv_heads;
      cache.ReadToken(layer, blocks[position / shape.block_size],
                      static_cast<int>(position % shape.block_size),
                      static_cast<int>(i % shape.num_kv_heads),
                      static_cast<char*>(k.data) + i * row,
                      static_cast<char*>(v.data) + i * row, shape.dtype);
    }
  }
  return nb::make_tuple(k.object, v.object);
}

Table AsTable(const Ints2& array) {
  return {array.data(), static_cast<int>(array.shape(0)),
          static_cast<int>(array.shape(1))};
}

nb::tuple AttendDirect(HostKVCache& cache, WorkerPool& pool,
                       nb::handle rows_array, const Ints1& context_lens,
                       const Ints2& tables, int layer, int num_q_heads,
                       double scale, double softcap, int window, bool append,
                       const std::string& isa) {
  const CacheShape& shape = cache.shape();
  CheckLayer(shape, layer);
  AttentionParams params{num_q_heads, static_cast<float>(scale),
                         static_cast<float>(softcap)};
  CheckParams(shape, params);
  const KernelTable& kernels = KernelsFor(isa);
  Floats rows("rows", rows_array);
  int64_t n = static_cast<int64_t>(context_lens.shape(0));
  rows.CheckShape(
      "rows", "[B, (N+2K)*H]",
      {n, int64_t{num_q_heads + 2 * shape.num_kv_heads} * shape.head_dim});
  if (static_cast<int64_t>(tables.shape(0)) != n) {
    throw std::invalid_argument("tables must have one row a sequence");
  }
  NewArray out =
      MakeArray(rows.dtype(), {n, int64_t{num_q_heads} * shape.head_dim});
  NewArray lse = MakeArray(Dtype::kFloat32, {n, num_q_heads});
  {
    nb::gil_scoped_release release;
    Plan plan(shape, num_q_heads, context_lens.data(), AsTable(tables), window,
              nullptr, {nullptr, 0, 0}, cache.num_nodes());
    Attend(cache, pool, kernels, params, plan,
           {rows.data(), rows.dtype(), layer, static_cast<int>(n), append,
            out.data, static_cast<float*>(lse.data)});
  }
  return nb::make_tuple(out.object, lse.object);
}

std::vector<double> TimeAttendCalls(HostKVCache& cache, WorkerPool& pool,
                                    nb::handle rows_array,
                                    const Ints1& context_lens,
                                    const Ints2& tables, int num_q_heads,
                                    double scale, int num_calls, bool asleep,
                                    bool read_only, const std::string& isa) {
  const CacheShape& shape = cache.shape();
  AttentionParams params{num_q_heads, static_cast<float>(scale)};
  CheckParams(shape, params);
  const KernelTable& kernels = KernelsFor(isa);
  Floats rows("rows", rows_array);
  const int64_t n = static_cast<int64_t>(context_lens.shape(0));
  rows.CheckShape(
      "rows", "[B, (N+2K)*H]",
      {n, int64_t{num_q_heads + 2 * shape.num_kv_heads} * shape.head_dim});
  if (static_cast<int64_t>(tables.shape(0)) != n) {
    throw std::invalid_argument("tables must have one row a sequence");
  }
  nb::gil_scoped_release release;
  Plan plan(shape, num_q_heads, context_lens.data(), AsTable(tables), 0,
            nullptr, {nullptr, 0, 0}, cache.num_nodes());
  return TimeAttend(cache, pool, kernels, params, plan, rows.data(),
                    rows.dtype(), num_calls, asleep, read_only);
}

void SetPlan(HostLane& lane, int index, const Ints1& context_lens,
             const Ints2& tables, std::optional<Ints2> chunks,
             std::optional<Ints2> chunk_tables, int uses, int window) {
  if (tables.shape(0) != context_lens.shape(0)) {
    throw std::invalid_argument("tables must have one row a sequence: " +
                                std::to_string(context_lens.shape(0)) +
                                " context_lens, " +
                                std::to_string(tables.shape(0)) + " rows");
  }
  if (chunks.has_value() != chunk_tables.has_value()) {
    throw std::invalid_argument("chunks and chunk_tables come together");
  }
  Table chunk_table{nullptr, 0, 0};
  const int32_t* chunk_data = nullptr;
  if (chunks.has_value()) {
    if (chunks->shape(1) != 4) {
      throw std::invalid_argument(
          "chunks must be [C, 4]: row_offset, num_tokens, start, "
          "scratch_slot");
    }
    if (chunks->shape(0) != chunk_tables->shape(0)) {
      throw std::invalid_argument("chunk_tables must have one row a chunk");
    }
    chunk_data = chunks->data();
    chunk_table = AsTable(*chunk_tables);
  }
  nb::gil_scoped_release release;
  lane.SetPlan(index, context_lens.data(), AsTable(tables), window, chunk_data,
               chunk_table, uses);
}

void Drain(HostLane& lane, double timeout_s) {
  std::vector<int> stuck;
  {
    nb::gil_scoped_release release;
    stuck = lane.Drain(timeout_s);
  }
  if (stuck.empty()) return;
  std::string text = "host lane " + std::to_string(lane.id()) +
                     " has jobs after " + std::to_string(timeout_s) +
                     " s on channels";
  for (int channel : stuck) {
    text += channel == HostLane::kChunks ? " (stores, fetches)"
                                         : " " + std::to_string(channel);
  }
  PyErr_SetString(PyExc_TimeoutError, text.c_str());
  throw nb::python_error();
}

nb::object Intervals(const HostLane& lane) {
  std::vector<std::array<int64_t, 5>> rows = lane.Intervals();
  nb::object array = nb::module_::import_("numpy").attr("empty")(
      nb::make_tuple(rows.size(), 5), "int64");
  auto view = nb::cast<nb::ndarray<int64_t, nb::c_contig>>(array);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < 5; ++j) view.data()[i * 5 + j] = rows[i][j];
  }
  return array;
}

std::shared_ptr<HostLane> MakeLane(std::shared_ptr<HostKVCache> cache,
                                   std::shared_ptr<WorkerPool> pool,
                                   LaneOptions options,
                                   std::optional<int> cuda_device,
                                   int64_t staging_bytes, int64_t swap_bytes,
                                   bool memory_operations) {
  if (!(options.watchdog_seconds > 0)) {
    throw std::invalid_argument("watchdog_s must be positive");
  }
  if (!cuda_device.has_value()) {
    return HostLane::Create(std::move(cache), std::move(pool),
                            std::move(options));
  }
  const CudaDriver* driver = LoadedCudaDriver();
  if (driver == nullptr) {
    throw std::invalid_argument(
        "cuda_device is " + std::to_string(*cuda_device) +
        "; there is no libcuda.so.1 with a device on this machine");
  }
  if (staging_bytes < 0 || swap_bytes < 0) {
    throw std::invalid_argument(
        "staging_bytes and swap_bytes must be 0 or more");
  }
  CudaOptions cuda;
  cuda.device = *cuda_device;
  cuda.staging_bytes = staging_bytes;
  cuda.swap_bytes = swap_bytes;
  cuda.memory_operations = memory_operations;
  nb::gil_scoped_release release;
  return HostLane::Create(std::move(cache), std::move(pool), std::move(options),
                          *driver, cuda);
}

std::string Repr(const CudaReport& r) {
  std::string out =
      "CudaReport(device=" + std::to_string(r.device) +
      ", memory_operations=" + (r.memory_operations ? "True" : "False") +
      ", round_trip_us=" + std::to_string(r.round_trip_us) +
      ", device_bytes=" + std::to_string(r.device_bytes) +
      ", pinned_bytes=" + std::to_string(r.pinned_bytes) +
      ", registered_bytes=" + std::to_string(r.registered_bytes) +
      ", register_s=" + std::to_string(r.register_seconds) + ", notes=[";
  for (const std::string& note : r.notes) out += "\"" + note + "\", ";
  return out + "])";
}

nb::dict Handlers(const std::vector<std::pair<const char*, void*>>& handlers) {
  nb::dict out;
  for (auto [name, handler] : handlers) out[name] = nb::capsule(handler);
  return out;
}

nb::dict Counters(const HostLane& lane) {
  LaneCounters c = lane.counters();
  nb::dict out;
  out["starts"] = c.starts;
  out["joins"] = c.joins;
  out["stores"] = c.stores;
  out["fetches"] = c.fetches;
  out["blocks_out"] = c.blocks_out;
  out["blocks_in"] = c.blocks_in;
  out["jobs"] = c.jobs;
  out["rows"] = c.rows;
  out["tokens"] = c.tokens;
  out["busy_ns"] = c.busy_ns;
  out["tie_copies"] = c.tie_copies;
  out["intervals_dropped"] = c.intervals_dropped;
  return out;
}

}  // namespace

NB_MODULE(_cpu_paged_attn, m) {
  // An engine that lives until the process ends is not a leak worth a line.
  nb::set_leak_warnings(false);

  nb::class_<WorkerPool>(m, "WorkerPool")
      .def(
          "__init__",
          [](WorkerPool* self, std::optional<int> num_threads,
             std::vector<int> cpus,
             std::optional<std::vector<std::vector<int>>> nodes) {
            if (num_threads.has_value() && *num_threads < 1) {
              throw std::invalid_argument(
                  "num_threads must be at least 1, "
                  "got " +
                  std::to_string(*num_threads));
            }
            new (self) WorkerPool(num_threads.value_or(0), std::move(cpus),
                                  nodes.has_value() ? *nodes : NumaNodes());
          },
          "num_threads"_a = nb::none(), nb::kw_only(),
          "cpus"_a = std::vector<int>(), "nodes"_a = nb::none())
      .def_prop_ro("num_nodes", &WorkerPool::num_nodes)
      .def_prop_ro("num_threads", &WorkerPool::num_threads)
      .def("close", &WorkerPool::Close,
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<HostKVCache>(m, "HostKVCache")
      .def(
          "__init__",
          [](HostKVCache* self, int num_layers, int num_blocks,
             int num_kv_heads, int head_dim, int block_size,
             const std::string& dtype, std::shared_ptr<WorkerPool> pool) {
            CacheShape shape{num_layers, num_blocks, num_kv_heads,
                             head_dim,   block_size, ParseDtype(dtype)};
            nb::gil_scoped_release release;
            new (self) HostKVCache(shape, std::move(pool));
          },
          "num_layers"_a, "num_blocks"_a, "num_kv_heads"_a, "head_dim"_a,
          "block_size"_a, "dtype"_a, "pool"_a)
      .def_prop_ro("num_bytes",
                   [](const HostKVCache& c) { return c.shape().num_bytes(); })
      .def_prop_ro("num_layers",
                   [](const HostKVCache& c) { return c.shape().num_layers; })
      .def_prop_ro("num_blocks",
                   [](const HostKVCache& c) { return c.shape().num_blocks; })
      .def_prop_ro("num_kv_heads",
                   [](const HostKVCache& c) { return c.shape().num_kv_heads; })
      .def_prop_ro("head_dim",
                   [](const HostKVCache& c) { return c.shape().head_dim; })
      .def_prop_ro("block_size",
                   [](const HostKVCache& c) { return c.shape().block_size; })
      .def_prop_ro(
          "dtype",
          [](const HostKVCache& c) { return DtypeName(c.shape().dtype); })
      .def_prop_ro("touch_s", &HostKVCache::touch_seconds)
      .def("write", &WriteTokens, "layer"_a, "table"_a, "start"_a, "k"_a, "v"_a)
      .def("read", &ReadTokens, "layer"_a, "table"_a, "start"_a, "n"_a)
      .def("fill", &HostKVCache::Fill, "value"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_static(
          "bytes_per_block",
          [](int num_layers, int num_kv_heads, int head_dim, int block_size,
             const std::string& dtype) {
            CacheShape shape{num_layers, 1,          num_kv_heads,
                             head_dim,   block_size, ParseDtype(dtype)};
            CheckShape(shape);
            return shape.num_bytes();
          },
          "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a,
          "dtype"_a);

  nb::class_<CudaReport>(m, "CudaReport")
      .def_ro("device", &CudaReport::device)
      .def_ro("memory_operations", &CudaReport::memory_operations)
      .def_ro("round_trip_us", &CudaReport::round_trip_us)
      .def_ro("device_bytes", &CudaReport::device_bytes)
      .def_ro("pinned_bytes", &CudaReport::pinned_bytes)
      .def_ro("registered_bytes", &CudaReport::registered_bytes)
      .def_ro("register_s", &CudaReport::register_seconds)
      .def_ro("notes", &CudaReport::notes)
      .def("__repr__", &Repr);

  nb::class_<HostLane>(m, "HostLane")
      .def(nb::new_([](std::shared_ptr<HostKVCache> cache,
                       std::shared_ptr<WorkerPool> pool, int num_q_heads,
                       int num_channels, int max_rows, double scale,
                       int num_plans, double softcap, const std::string& isa,
                       std::optional<int> cuda_device, int64_t staging_bytes,
                       double watchdog_s, int64_t swap_bytes,
                       bool memory_operations, int deep_slots, int deep_rows) {
             return MakeLane(
                 std::move(cache), std::move(pool),
                 {num_q_heads, num_channels, max_rows,
                  static_cast<float>(scale), static_cast<float>(softcap),
                  num_plans, isa, watchdog_s, deep_slots, deep_rows},
                 cuda_device, staging_bytes, swap_bytes, memory_operations);
           }),
           "cache"_a, "pool"_a, "num_q_heads"_a, "num_channels"_a, "max_rows"_a,
           "scale"_a, "num_plans"_a = 8, nb::kw_only(), "softcap"_a = 0.0,
           "isa"_a = "", "cuda_device"_a = nb::none(),
           "staging_bytes"_a = CudaOptions().staging_bytes,
           "watchdog_s"_a = 30.0, "swap_bytes"_a = 0,
           "memory_operations"_a = true, "deep_slots"_a = 0, "deep_rows"_a = 0)
      .def_prop_ro("id", &HostLane::id)
      .def_prop_ro("cuda_report",
                   [](const HostLane& lane) -> std::optional<CudaReport> {
                     if (lane.cuda() == nullptr) return std::nullopt;
                     return lane.cuda()->report();
                   })
      .def_prop_ro("isa",
                   [](const HostLane& lane) { return lane.kernels().name; })
      .def("set_plan", &SetPlan, "index"_a, "context_lens"_a, "tables"_a,
           "chunks"_a = nb::none(), "chunk_tables"_a = nb::none(), "uses"_a = 0,
           nb::kw_only(), "window"_a = 0)
      .def("plan_in_use", &HostLane::PlanInUse, "index"_a)
      .def_prop_ro(
          "num_swaps_out",
          [](const HostLane& lane) {
            return lane.cuda() == nullptr ? 0u : lane.cuda()->num_swaps_out();
          })
      .def(
          "await_swaps_out",
          [](HostLane& lane, uint32_t count) {
            if (lane.cuda() != nullptr) lane.cuda()->AwaitSwapsOut(count);
          },
          "count"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("drain", &Drain, "timeout_s"_a)
      .def("error",
           [](const HostLane& lane) -> std::optional<std::string> {
             Error error = lane.error();
             if (error.empty()) return std::nullopt;
             return error;
           })
      .def("clear_error", &HostLane::ClearError)
      .def(
          "set_delay_us",
          [](HostLane& lane, int64_t us) { lane.SetDelay(us * 1000); },
          "microseconds"_a)
      .def("fail_next_job", &HostLane::FailNextJob, "message"_a)
      .def("record", &HostLane::Record, "on"_a)
      .def("intervals", &Intervals)
      .def("counters", &Counters)
      .def("close", &HostLane::Close, nb::call_guard<nb::gil_scoped_release>());

  m.def("attend", &AttendDirect, "cache"_a, "pool"_a, "rows"_a,
        "context_lens"_a, "tables"_a, "layer"_a, nb::kw_only(), "num_q_heads"_a,
        "scale"_a, "softcap"_a = 0.0, "window"_a = 0, "append"_a = false,
        "isa"_a = "");
  m.def(
      "isa", [](const std::string& name) { return KernelsFor(name).name; },
      "name"_a = "");
  m.def(
      "time_read",
      [](const HostKVCache& cache, WorkerPool& pool, int streams, int ahead,
         const std::string& isa) {
        if (streams != 1 && streams != 2 && streams != 4 && streams != 8) {
          throw std::invalid_argument("streams must be 1, 2, 4 or 8, got " +
                                      std::to_string(streams));
        }
        const KernelTable& kernels = KernelsFor(isa);
        nb::gil_scoped_release release;
        return TimeRead(cache, pool, kernels, streams, ahead);
      },
      "cache"_a, "pool"_a, nb::kw_only(), "streams"_a, "ahead"_a, "isa"_a = "");
  m.def("time_attend", &TimeAttendCalls, "cache"_a, "pool"_a, "rows"_a,
        "context_lens"_a, "tables"_a, nb::kw_only(), "num_q_heads"_a, "scale"_a,
        "num_calls"_a, "asleep"_a = false, "read_only"_a = false, "isa"_a = "");
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : AvailableKernels()) {
      names.push_back(table->name);
    }
    return names;
  });
  m.def("usable_cores", &UsableCores);
  m.def("default_num_threads", [] { return DefaultNumThreads(UsableCores()); });
  m.def("ffi_api_version", [] {
    auto [major, minor] = FfiApiVersion();
    return nb::make_tuple(major, minor);
  });
  m.def("registrations", [] { return Handlers(CpuHandlers()); });
  m.def("cuda_registrations", [] {
    return CudaDeviceCount() > 0 ? Handlers(CudaHandlers()) : nb::dict();
  });
}

}  // namespace neojax
