#include "ffi/cpu_paged_attn/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <stdexcept>

namespace neojax {

namespace {

// The first's name and bfloat16 kernel, the rest of the other.
[[maybe_unused]] KernelTable WithBf16Of(const KernelTable& bf16,
                                        const KernelTable& rest) {
  return {bf16.name,    rest.float32, bf16.bfloat16,
          rest.float16, rest.read,    rest.read_tiles};
}

#ifdef NEOJAX_HAVE_AMX
// Whether the machine has AMX with BF16 and the kernel lets this process use
// it, which must be asked for once: tiles make thread switches dearer.
bool RequestAmx() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

}  // namespace

std::vector<const KernelTable*> AvailableKernels() {
  std::vector<const KernelTable*> tables = {&kScalarKernels};
  // The build says which files the compiler could make. The builtin also
  // checks that the operating system saves the registers.
#ifdef NEOJAX_HAVE_AVX2
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return tables;
  }
  tables.push_back(&kAvx2Kernels);
#endif
#ifdef NEOJAX_HAVE_AVX512
  if (!__builtin_cpu_supports("avx512f") ||
      !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl")) {
    return tables;
  }
  tables.push_back(&kAvx512Kernels);
#endif
#ifdef NEOJAX_HAVE_AVX512BF16
  if (!__builtin_cpu_supports("avx512bf16")) return tables;
  static const KernelTable kWithBf16 =
      WithBf16Of(kAvx512Bf16Kernels, kAvx512Kernels);
  tables.push_back(&kWithBf16);
#endif
#ifdef NEOJAX_HAVE_AMX
  static const KernelTable kWithAmx = WithBf16Of(kAmxKernels, kAvx512Kernels);
  static const bool has_amx = RequestAmx();
  if (has_amx) tables.push_back(&kWithAmx);
#endif
#ifdef NEOJAX_HAVE_NEON
  tables.push_back(&kNeonKernels);
#endif
#ifdef NEOJAX_HAVE_NEONBF16
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  static const KernelTable kWithBf16 =
      WithBf16Of(kNeonBf16Kernels, kNeonKernels);
  if (getauxval(AT_HWCAP2) & kHwcap2Bf16) tables.push_back(&kWithBf16);
#endif
  return tables;
}

const KernelTable& KernelsFor(const std::string& name) {
  std::string wanted = name;
  std::string asked_by = "isa";
  if (wanted.empty()) {
    const char* env = std::getenv("NEOJAX_CPU_ISA");
    if (env != nullptr) wanted = env;
    asked_by = "NEOJAX_CPU_ISA";
  }
  std::vector<const KernelTable*> tables = AvailableKernels();
  if (wanted.empty()) return *tables.back();
  std::string names;
  for (const KernelTable* table : tables) {
    if (wanted == table->name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument(
      asked_by + "=" + wanted +
      " cannot run on this machine; available: " + names);
}

}  // namespace neojax
