#include "ffi/cpu_paged_attn/topology.h"

#include <pthread.h>
#include <sched.h>

#include <cstdlib>
#include <fstream>

namespace neojax {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> CoresOfThisThread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

}  // namespace

std::vector<int> ParseCores(const std::string& text) {
  std::vector<int> cores;
  const char* at = text.c_str();
  for (;;) {
    char* end;
    long first = std::strtol(at, &end, 10);
    if (end == at) return cores;
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long core = first; core <= last && core < CPU_SETSIZE; ++core) {
      if (core >= 0) cores.push_back(static_cast<int>(core));
    }
    if (*end != ',') return cores;
    at = end + 1;
  }
}

std::vector<std::vector<int>> NumaNodes(const std::string& sysfs) {
  const std::string dir = sysfs + "/devices/system/node/";
  std::vector<std::vector<int>> nodes;
  for (int node : ParseCores(FirstLine(dir + "online"))) {
    std::vector<int> usable;
    const std::string name = dir + "node" + std::to_string(node);
    for (int core : ParseCores(FirstLine(name + "/cpulist"))) {
      if (MayUseCore(core)) usable.push_back(core);
    }
    if (usable.empty()) continue;
    if (nodes.size() == kMaxNodes) {
      nodes.back().insert(nodes.back().end(), usable.begin(), usable.end());
    } else {
      nodes.push_back(usable);
    }
  }
  if (nodes.size() < 2) nodes.clear();
  return nodes;
}

bool MayUseCore(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  return core >= 0 && core < CPU_SETSIZE &&
         sched_getaffinity(0, sizeof set, &set) == 0 && CPU_ISSET(core, &set);
}

bool BindThisThread(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
  }
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

KeepAffinity::KeepAffinity() : cores_(CoresOfThisThread()) {}

KeepAffinity::~KeepAffinity() {
  if (!cores_.empty()) BindThisThread(cores_);
}

}  // namespace neojax
