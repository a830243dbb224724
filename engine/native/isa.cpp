#include "isa.hpp"

#include <atomic>
#include <stdexcept>
#include <utility>

namespace kvferry::engine {

namespace {

const std::vector<std::pair<std::string, Isa>>& available() {
  static const std::vector<std::pair<std::string, Isa>> found = [] {
    std::vector<std::pair<std::string, Isa>> isas;
#ifdef KVFERRY_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16")) {
      isas.emplace_back("avx512", Isa::avx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      isas.emplace_back("avx2", Isa::avx2);
    }
#endif
    isas.emplace_back("baseline", Isa::baseline);
    return isas;
  }();
  return found;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{available().front().second};
  return isa;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto& entry : available()) names.push_back(entry.first);
  return names;
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void use_isa(const std::string& name) {
  std::string known;
  for (const auto& [candidate, isa] : available()) {
    if (candidate == name) {
      current().store(isa);
      return;
    }
    known += (known.empty() ? "" : ", ") + candidate;
  }
  throw std::invalid_argument("kernels for " + name + " do not run here; there are: " + known);
}

}  // namespace kvferry::engine
