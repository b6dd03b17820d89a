// Plain assertions for the C++ tests: no framework to fetch.
#ifndef NEOJAX_CPU_PAGED_ATTN_TESTS_CHECK_H_
#define NEOJAX_CPU_PAGED_ATTN_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, \
                   #condition);                                         \
      std::abort();                                                     \
    }                                                                   \
  } while (0)

// fn() must throw an exception whose text contains `part`.
template <class Fn>
void CheckThrows(const std::string& part, Fn fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    if (std::string(e.what()).find(part) != std::string::npos) return;
    std::fprintf(stderr, "threw \"%s\", wanted \"%s\"\n", e.what(),
                 part.c_str());
    std::abort();
  }
  std::fprintf(stderr, "did not throw \"%s\"\n", part.c_str());
  std::abort();
}

#endif  // NEOJAX_CPU_PAGED_ATTN_TESTS_CHECK_H_
