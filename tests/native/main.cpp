#include <unistd.h>

#include <cstdio>
#include <exception>

#include "harness.hpp"

namespace kvferry::testing {

namespace {

std::string library;

std::vector<std::pair<const char*, void (*)()>>& tests() {
  static std::vector<std::pair<const char*, void (*)()>> all;
  return all;
}

}  // namespace

Test::Test(const char* name, void (*run)()) { tests().emplace_back(name, run); }

const std::string& ucp_library() { return library; }

}  // namespace kvferry::testing

int main(int argc, char** argv) {
  using namespace kvferry::testing;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s LIBUCP [PART-OF-A-NAME]\n", argv[0]);
    return 2;
  }
  library = argv[1];
  int failed = 0;
  int passed = 0;
  for (const auto& [name, run] : tests()) {
    if (argc > 2 && std::string(name).find(argv[2]) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", name);
    alarm(120);  // what hangs is killed, and not only here
    try {
      run();
      ++passed;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s failed: %s\n", name, error.what());
      ++failed;
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
