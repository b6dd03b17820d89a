#include "ffi/cpu_paged_attn/cpu_count.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace neojax {
namespace {

int AffinityCores() {
  // The mask of the kernel may be wider than cpu_set_t: grow until it fits.
  for (int cpus = 1024; cpus <= 65536; cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    size_t size = CPU_ALLOC_SIZE(cpus);
    CPU_ZERO_S(size, set);
    int rc = sched_getaffinity(0, size, set);
    int count = rc == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

// Whole cores that quota/period of one cgroup directory allows; 0: no limit.
int QuotaCores(const std::string& v2_dir, const std::string& v1_dir) {
  std::string quota;
  double period = 0;
  std::ifstream v2(v2_dir + "/cpu.max");
  if (v2 >> quota >> period) {
    if (quota == "max" || period <= 0) return 0;
    return std::max(1, static_cast<int>(std::stod(quota) / period));
  }
  double quota_us = 0;
  std::ifstream q(v1_dir + "/cpu.cfs_quota_us");
  std::ifstream p(v1_dir + "/cpu.cfs_period_us");
  if (q >> quota_us && p >> period && quota_us > 0 && period > 0) {
    return std::max(1, static_cast<int>(quota_us / period));
  }
  return 0;
}

// The process's own cgroup and every parent of it count: the tightest wins.
int CgroupCores() {
  std::string own_v2 = "/", own_v1 = "/";
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':');
    size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (controllers.empty()) own_v2 = path;
    if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      own_v1 = path;
    }
  }
  auto parents = [](std::string path) {
    std::vector<std::string> out;
    while (path.size() > 1) {
      out.push_back(path);
      path.resize(path.rfind('/'));
    }
    out.push_back("");
    return out;
  };
  int cores = 0;
  auto take = [&](int limit) {
    if (limit > 0) cores = cores == 0 ? limit : std::min(cores, limit);
  };
  for (const std::string& dir : parents(own_v2)) {
    take(QuotaCores("/sys/fs/cgroup" + dir, ""));
  }
  for (const std::string& dir : parents(own_v1)) {
    take(QuotaCores("", "/sys/fs/cgroup/cpu" + dir));
  }
  return cores;
}

}  // namespace

int UsableCores() {
  int cores = AffinityCores();
  int quota = CgroupCores();
  return quota > 0 ? std::min(cores, quota) : cores;
}

int DefaultNumThreads(int usable_cores) {
  return std::max(1, usable_cores - (usable_cores < 4 ? 1 : 2));
}

}  // namespace neojax
