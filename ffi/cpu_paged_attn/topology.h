// Which cores share memory.
#ifndef NEOJAX_CPU_PAGED_ATTN_TOPOLOGY_H_
#define NEOJAX_CPU_PAGED_ATTN_TOPOLOGY_H_

#include <string>
#include <vector>

namespace neojax {

// Most nodes told apart; cores of further ones count as the last one's.
enum : int { kMaxNodes = 8 };

// Cores of each NUMA node that this process may use; nodes without any are
// left out. `sysfs` is where Linux shows them. One node, or none shown: empty,
// because then there is nothing to tell apart.
std::vector<std::vector<int>> NumaNodes(const std::string& sysfs = "/sys");

// "0-3,8" as 0, 1, 2, 3, 8; what cannot be read is left out.
std::vector<int> ParseCores(const std::string& text);

// Whether this process may run on the core.
bool MayUseCore(int core);

// Binds the calling thread to the cores; false if none is allowed.
bool BindThisThread(const std::vector<int>& cores);

// The calling thread's cores now, and again at the end of the scope.
class KeepAffinity {
 public:
  KeepAffinity();
  ~KeepAffinity();
  KeepAffinity(const KeepAffinity&) = delete;
  KeepAffinity& operator=(const KeepAffinity&) = delete;

 private:
  std::vector<int> cores_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_TOPOLOGY_H_
