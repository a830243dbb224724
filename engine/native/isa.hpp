// Which instructions the kernels were compiled for, and which of those variants run.
//
// Every file in kernels/ is compiled once per variant, in a namespace of its own (KVFERRY_ISA). The variant is chosen
// when the process starts: the best one that this processor has. Tests ask for the others.
#pragma once

#include <string>
#include <vector>

namespace kvferry::engine {

enum class Isa { baseline, avx2, avx512 };

// Those that this build has and this processor runs, best first. `avx512` needs avx512f, bw, vl, dq and avx512_bf16.
std::vector<std::string> available_isas();

// The variant in use.
Isa current_isa();

// Use another one, in the whole process. Throws std::invalid_argument, naming those there are.
void use_isa(const std::string& name);

}  // namespace kvferry::engine

// Calls `function` of the variant in use, e.g. KVFERRY_DISPATCH(attend, arguments). Each variant is declared in a
// header by KVFERRY_DECLARE.
#ifdef KVFERRY_X86
#define KVFERRY_DECLARE(...) \
  namespace baseline {       \
  __VA_ARGS__;               \
  }                          \
  namespace avx2 {           \
  __VA_ARGS__;               \
  }                          \
  namespace avx512 {         \
  __VA_ARGS__;               \
  }
#define KVFERRY_DISPATCH(function, ...)                                                               \
  (::kvferry::engine::current_isa() == ::kvferry::engine::Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : ::kvferry::engine::current_isa() == ::kvferry::engine::Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                                                                      : baseline::function(__VA_ARGS__))
#else
#define KVFERRY_DECLARE(...) \
  namespace baseline {       \
  __VA_ARGS__;               \
  }
#define KVFERRY_DISPATCH(function, ...) baseline::function(__VA_ARGS__)
#endif
